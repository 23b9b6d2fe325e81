"""One file per question, each against its peers, side by side in one run, ratios first."""
