"""Training methods: pure losses, and one module a method."""
