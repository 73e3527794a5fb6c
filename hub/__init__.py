"""Sharing adapters and models on the Hub: their cards, and pushing them."""

from cacheformers.hub.push import HubError, PushesWithCard, push_to_hub

__all__ = ["HubError", "PushesWithCard", "push_to_hub"]
