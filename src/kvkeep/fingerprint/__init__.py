"""Identity by content: what a model and a tokenizer are, whatever they are called and wherever they lie."""

from kvkeep.fingerprint.config import config_fields
from kvkeep.fingerprint.holdings import unwrap
from kvkeep.fingerprint.hooks import HookWatch
from kvkeep.fingerprint.model import ModelParts, fingerprint_model
from kvkeep.fingerprint.rope import LengthRule, length_rule
from kvkeep.fingerprint.tensors import check_hashable, tensor_digests
from kvkeep.fingerprint.tokenizer import chat_template_digest, fingerprint_tokenizer
from kvkeep.fingerprint.watch import ModelWatch

__all__ = [
    "HookWatch",
    "LengthRule",
    "ModelParts",
    "ModelWatch",
    "chat_template_digest",
    "check_hashable",
    "config_fields",
    "fingerprint_model",
    "fingerprint_tokenizer",
    "length_rule",
    "tensor_digests",
    "unwrap",
]
