"""The commands of `edge-runtime`. Everything heavy is imported inside its command, so that `--help` and `submit` stay quick."""
