"""The programs that models are served by, each in an environment of its own: `make engines`."""
