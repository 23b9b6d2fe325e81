"""Pure functions on tensors, one folder per operation: a plain reference beside its fast forms."""
