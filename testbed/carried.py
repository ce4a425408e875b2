"""The folders and files that the testbed carries: the demo model, the scenarios, the prompts."""

from pathlib import Path

FOLDER = Path(__file__).resolve().parent
SCENARIOS = FOLDER / "scenarios"
EIGHT_NODES = SCENARIOS / "eight_nodes.toml"
DEMO_MODEL = FOLDER / "models" / "edge-moe-demo"
PROMPTS = FOLDER / "prompts" / "domains.jsonl"
