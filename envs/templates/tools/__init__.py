"""A question whose answer only a tool knows."""
