"""What this project claims about positions, measured on published, trained weights: `make real`.

`weights.py` installs the weights and checks them. Each other file measures one part, and ``python -m
benchmarks.real_models`` runs the parts. No weight is part of this repository or of the package.
"""
