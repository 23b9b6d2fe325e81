"""Measurements of what a function, a module or a published model does with positions."""
