"""Pure functions on tensors, one folder per operation: a plain reference and faster implementations."""
