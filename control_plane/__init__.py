"""The HTTP services: OpenAI endpoint, health, metrics."""
