"""The generation of a pool's contract: equal contracts have equal revisions, whoever computes them and when."""

import hashlib
import json
from typing import Any

from google.protobuf import json_format

from kvist_controller.pools import PoolSpec
from kvist_controller.resources import ModelServiceSpec

REVISION_HEX_DIGITS = 12


def pool_revision(spec: ModelServiceSpec, pool: PoolSpec) -> str:
    """Names what the workers of a pool must agree on.

    Replicas, aliases and time limits are left out: changing them restarts no worker.
    """
    contract: dict[str, Any] = {
        "model": spec.model,
        "engine": spec.engine.name,
        "arguments": spec.arguments_of(pool),
        "role": pool.role,
        "tokenizerDigest": spec.tokenizer_digest,
        "hashUnitTokens": spec.hash_unit_tokens,
    }
    hand_over = spec.hand_over
    if hand_over is not None:
        # When a prompt is divided concerns routers alone.
        hand_over.ClearField("prefill_from_tokens")
        contract["handOver"] = json_format.MessageToDict(hand_over)
    canonical = json.dumps(contract, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()[:REVISION_HEX_DIGITS]
