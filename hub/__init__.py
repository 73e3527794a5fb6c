"""Model cards, pushing to the Hub, and results in cards' metadata. Importing it adds cards to what is saved."""

from cacheformers.hub.card import refresh_card
from cacheformers.hub.push import HubError, push_to_hub, uploading_with_card
from cacheformers.modeling.pretrained import AFTER_SAVING, Uploads

AFTER_SAVING.append(refresh_card)
Uploads.uploading = staticmethod(uploading_with_card)

__all__ = ["HubError", "push_to_hub"]
