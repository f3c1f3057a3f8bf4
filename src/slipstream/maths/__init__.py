"""Pure functions of tensors and numbers: no models, no state, no I/O."""
