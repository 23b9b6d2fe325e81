"""Interfaces to other programs: tables for them, readers of their files, and checks of their positions."""
