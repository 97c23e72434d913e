"""Pure tensor functions: no state, no device choice, no communication (torch only)."""
