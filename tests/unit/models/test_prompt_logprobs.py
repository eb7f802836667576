from __future__ import annotations

from pathlib import Path

import numpy as np
from support.tiny_engines import make_model, prompt

from redline.models.files.hf import load_decoder
from redline.models.prompt_logprobs import prompt_logprobs


def test_logprobs_of_a_prompt_are_those_that_transformers_computes(tmp_path: Path) -> None:
    model = make_model(tmp_path)
    tokens = prompt(23, seed=4)
    logits = model.logits(tokens)
    expected = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    found = prompt_logprobs(load_decoder(model.folder), tokens.tolist())
    np.testing.assert_allclose(found, expected[np.arange(22), tokens[1:]], atol=1e-4)
