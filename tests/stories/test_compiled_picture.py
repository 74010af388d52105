"""A picture, a static cache and compiled decoding in Gemma 3: the call that crashed, behind a stored prefix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_media import build_seeing, seen
from transformers.generation.configuration_utils import CompileConfig

from kvkeep import CacheStore


@pytest.mark.slow
def test_gemma_3_decodes_compiled_behind_a_stored_picture(tmp_path: Path) -> None:
    model = build_seeing("gemma3")
    kv = CacheStore(tmp_path / "store").bind(model)
    first, both = seen("gemma3", [1]), seen("gemma3", [1, 2])
    options: dict[str, Any] = {
        "cache_implementation": "static",
        "max_new_tokens": 4,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    control = model.generate(**both, **options, disable_compile=True)
    graphs: list[int] = []

    def backend(graph: Any, _inputs: Any, **_options: Any) -> Any:
        graphs.append(1)
        return graph.forward

    compiled = CompileConfig(backend=backend, fullgraph=False, dynamic=False)
    compiled._compile_all_devices = True  # as it is done on accelerators by itself
    torch._dynamo.reset()
    try:
        kv.warm(first)
        counts = []
        for _ in range(3):
            out = kv.generate(**both, **options, compile_config=compiled)
            counts.append(len(graphs))
            assert kv.last_report is not None
            assert (kv.last_report.reused_tokens > 0, kv.last_report.reason) == (True, None)
            assert torch.equal(out.sequences, control.sequences)
            for mine, other in zip(out.logits, control.logits, strict=True):
                assert (mine - other).abs().max() < 5e-5 * other.abs().max()
    finally:
        torch._dynamo.reset()
    assert counts[0] > 0, "nothing was compiled"
    assert counts[1:] == counts[:1] * 2, "a repeated request compiles nothing anew"
