"""Dense products of activations with a weight matrix."""
