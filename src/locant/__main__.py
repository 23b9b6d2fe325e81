"""``python -m locant``: the command line."""

from locant.cli import main

if __name__ == "__main__":
    main()
