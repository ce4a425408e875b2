"""The cluster on paper: machines, links, and where every expert lives. Decides; touches only topology files."""
