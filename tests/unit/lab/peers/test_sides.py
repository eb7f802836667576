from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.small_models import VOCAB_SIZE, llama, write_model

from redline.config.sections.engine import EngineConfig
from redline.engine import NativeEngine
from redline.errors import EngineError
from redline.lab.material.networks import Network, make_network, random_decoder
from redline.lab.material.prompts import question, random_prompts
from redline.lab.measure.machine import MemoryMeter, measure_machine
from redline.lab.peers.generation_sides import Batch, EngineSide, StreamSide, TransformersSide
from redline.lab.peers.vllm_side import VllmSide, vllm_arguments
from redline.launch.kinds import sample_from
from redline.models.files.hf import load_config, load_decoder

CPU = torch.device("cpu")
BATCH = Batch([np.arange(2, 2 + length, dtype=np.int32) for length in (7, 4, 11)], n=2, new_tokens=6, seed=3)
UNEVEN = replace(BATCH, lengths=[1, 6, 3])


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Network:
    """Peaked enough to notice wrong logprobs, with an end token that it will sample."""
    folder = tmp_path_factory.mktemp("model")
    write_model(folder, llama(eos_token_id=list(range(VOCAB_SIZE))), std=0.3)
    return Network(load_config(folder), folder, load_decoder(folder))


@pytest.fixture
def engine(network: Network) -> NativeEngine:
    return NativeEngine(network.decoder, EngineConfig(max_num_seqs=6, max_model_len=32, block_size=4))


# ── our engine ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_completion_has_its_full_length_and_a_first_token_time(engine: NativeEngine) -> None:
    run = EngineSide(engine).run(BATCH)
    assert run.num_tokens == BATCH.num_tokens == 36
    assert run.first_token_s.shape == (6,)
    assert 0 < run.first_token_s.min() <= run.first_token_s.max() < run.seconds
    assert run.tokens_per_s == 36 / run.seconds


def test_a_streamed_run_samples_the_same_and_sees_every_token_come(engine: NativeEngine) -> None:
    whole, streamed = EngineSide(engine).run(BATCH), StreamSide(engine).run(BATCH)
    assert streamed.mean_logprob == pytest.approx(whole.mean_logprob, abs=1e-5)
    assert streamed.num_tokens == 36
    assert streamed.first_token_s.shape == (6,)
    assert streamed.inter_token_s.shape == (6 * 5,)
    assert streamed.inter_token_s.min() >= 0


def test_completions_are_as_long_as_their_prompt_says(engine: NativeEngine, network: Network) -> None:
    whole, streamed = EngineSide(engine).run(UNEVEN), StreamSide(engine).run(UNEVEN)
    theirs = TransformersSide(network.as_transformers()).run(UNEVEN)
    assert [run.num_tokens for run in (whole, streamed, theirs)] == [UNEVEN.num_tokens] * 3 == [20] * 3
    assert [run.inter_token_s.size for run in (streamed, theirs)] == [14, 14]
    assert streamed.mean_logprob == pytest.approx(whole.mean_logprob, abs=1e-5)


def test_an_engine_of_others_can_take_the_place_of_ours(engine: NativeEngine, network: Network) -> None:
    assert network.folder is not None
    theirs = sample_from(network.decoder, network.folder, EngineConfig(kind="transformers", max_num_seqs=6, max_model_len=32))
    whole, streamed = EngineSide(theirs).run(BATCH), StreamSide(theirs).run(BATCH)
    assert whole.mean_logprob == pytest.approx(EngineSide(engine).run(BATCH).mean_logprob, abs=1e-5)
    assert streamed.mean_logprob == pytest.approx(whole.mean_logprob, abs=1e-5)
    assert streamed.inter_token_s.shape == (6 * 5,)


def test_what_an_earlier_run_cached_does_not_help(engine: NativeEngine) -> None:
    side, hits = EngineSide(engine), [0]
    for _ in range(2):
        side.run(BATCH)
        hits.append(engine.stats.prefix_hit_tokens)
    assert hits[1] > 0  # the prompts begin alike
    assert hits[2] == 2 * hits[1]


# ── transformers ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_transformers_generates_past_its_end_tokens(network: Network) -> None:
    run = TransformersSide(network.as_transformers()).run(BATCH)
    assert run.num_tokens == 36
    assert run.inter_token_s.shape == (30,)
    assert 0 < run.first_token_s[0] < run.seconds


def test_its_logprobs_are_those_of_the_tokens_it_sampled(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    """Held against a forward of each whole sequence, without padding."""
    model, seen = network.as_transformers(), []
    generate = model.generate
    monkeypatch.setattr(model, "generate", lambda *args, **kwargs: seen.append(generate(*args, **kwargs)) or seen[-1])
    run = TransformersSide(model).run(BATCH)
    expected = []
    for i, sequence in enumerate(seen[0].clone()):
        prompt = len(BATCH.prompts[i // BATCH.n])
        tokens = sequence[-prompt - BATCH.new_tokens :]
        logprobs = model(tokens[None]).logits[0].float().log_softmax(-1)
        expected += [logprobs[t - 1, tokens[t]].item() for t in range(prompt, len(tokens))]
    assert run.mean_logprob == pytest.approx(np.mean(expected), abs=1e-4)


def test_both_sides_sample_from_one_distribution(network: Network) -> None:
    batch = Batch(BATCH.prompts, n=100, new_tokens=12, seed=0)
    ours = EngineSide(NativeEngine(network.decoder, EngineConfig(max_num_seqs=300, max_model_len=32)))
    theirs = TransformersSide(network.as_transformers())
    assert ours.run(batch).mean_logprob == pytest.approx(theirs.run(batch).mean_logprob, abs=0.1)


# ── vLLM ───────────────────────────────────────────────────────────────────────────────────────────────────────────────

FAKE_VLLM = """
import json, sys
settings = json.loads(sys.argv[1])
if settings["model"] == "broken":
    sys.exit("no such device")
print(json.dumps({"version": "0.0"}), flush=True)
for line in sys.stdin:
    batch = json.loads(line)
    tokens = batch["n"] * sum(batch["new_tokens"])
    print(json.dumps({"seconds": 2.0, "num_tokens": tokens, "mean_logprob": -1.0}), flush=True)
"""


@pytest.fixture
def fake_vllm(tmp_path: Path) -> Path:
    path = tmp_path / "fake_vllm.py"
    path.write_text(FAKE_VLLM)
    return path


def test_vllm_runs_in_a_process_of_its_own(fake_vllm: Path) -> None:
    side = VllmSide({"model": "some"}, Path(sys.executable), fake_vllm)
    assert side.version == "0.0"
    assert [side.run(BATCH).tokens_per_s for _ in range(2)] == [18, 18]
    side.close()
    assert side._child._process.returncode == 0


FAKE_PACKAGE = """
from types import SimpleNamespace as Record

__version__ = "9.9"
print("noise on stdout")


def SamplingParams(**given):
    return Record(**given)


class LLM:
    def __init__(self, **given):
        self.resets = 0

    def reset_prefix_cache(self):
        self.resets += 1

    def generate(self, prompts, params, use_tqdm):
        assert all((one.logprobs, one.ignore_eos, one.temperature) == (0, True, 1.0) for one in params)
        self.resets -= 1
        assert self.resets == 0
        return [self._answer(one) for prompt, one in zip(prompts, params, strict=True) if prompt["prompt_token_ids"]]

    def _answer(self, params):
        tokens = list(range(params.max_tokens))
        return Record(outputs=[Record(token_ids=tokens, logprobs=Record(logprobs=[-0.5] * len(tokens)))] * params.n)
"""


def test_the_program_speaks_with_vllm_and_keeps_its_noise_out_of_the_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vllm.py").write_text(FAKE_PACKAGE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    side = VllmSide({"model": "some"})
    run, uneven = side.run(BATCH), side.run(UNEVEN)
    side.close()
    assert side.version == "9.9"
    assert (run.num_tokens, run.mean_logprob) == (36, -0.5)
    assert uneven.num_tokens == 20
    assert run.inter_token_s.size == 0


def test_a_vllm_that_ends_says_why(fake_vllm: Path) -> None:
    with pytest.raises(EngineError, match="exit code 1:\nno such device"):
        VllmSide({"model": "broken"}, program=fake_vllm)


def test_vllm_gets_our_sizes(tmp_path: Path) -> None:
    sizes = EngineConfig(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=300)
    arguments = vllm_arguments(tmp_path, has_weights=False, dtype="bfloat16", engine=sizes, device=CPU)
    assert arguments["load_format"] == "dummy"
    assert (arguments["max_num_seqs"], arguments["max_model_len"], arguments["max_num_batched_tokens"]) == (8, 300, 300)
    assert json.dumps(arguments)


# ── networks and prompts ───────────────────────────────────────────────────────────────────────────────────────────────


def test_a_shape_is_drawn_once_for_all_sides(tmp_path: Path) -> None:
    """Its copy for transformers computes the same."""
    config = llama(attention_bias=True)
    decoder = random_decoder(config, CPU, torch.float32, seed=1)
    network = Network(config, None, decoder)
    engine = NativeEngine(decoder, EngineConfig(max_num_seqs=1, max_model_len=32))
    batch = Batch([np.arange(5, dtype=np.int32)], 1, 1, 0)
    [[completion]] = engine.generate(batch.requests())
    logits = network.as_transformers()(torch.arange(5)[None]).logits[0, -1]
    assert completion.logprobs[0] == pytest.approx(logits.log_softmax(-1)[completion.token_ids[0]].item(), abs=1e-4)
    assert torch.equal(random_decoder(config, CPU, torch.float32, seed=1).embed, decoder.embed)


def test_a_shape_as_a_folder_has_a_config_and_no_weights() -> None:
    network = Network(llama(), None, random_decoder(llama(), CPU, torch.float32, seed=0))
    with network.as_folder() as folder:
        assert [path.name for path in folder.iterdir()] == ["config.json"]
    assert not folder.exists()


def test_a_model_with_a_folder_is_found_there() -> None:
    network = make_network("builtin:tiny", CPU, torch.float32, seed=0)
    with network.as_folder() as folder:
        assert folder == network.folder


def test_random_prompts_differ_from_round_to_round_and_repeat_with_their_key() -> None:
    first, again, other = (np.stack(random_prompts(3, 5, 50, key)) for key in ((0, 1), (0, 1), (0, 2)))
    assert (first == again).all()
    assert (first != other).any()
    assert first.dtype == np.int32
    assert first.shape == (3, 5)
    assert first.min() >= 10
    assert first.max() < 50


def test_no_question_is_asked_twice() -> None:
    assert len({question(index) for index in range(200)}) == 200


# ── the machine ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_machine_is_measured_and_says_how() -> None:
    machine = measure_machine(CPU, torch.float32)
    assert machine.bandwidth > 1e8
    assert machine.flops > 1e8
    assert "2048³ float32 product" in machine.how


def test_memory_counts_what_stays_and_the_peak_of_a_run_but_not_the_making() -> None:
    megabyte, page = 2**20, 4096
    meter = MemoryMeter(CPU)
    scratch = np.zeros(64 * megabyte, np.uint8)
    scratch[::page] = 1
    del scratch
    held = np.zeros(32 * megabyte, np.uint8)
    held[::page] = 1
    meter.begin_run()
    during = np.zeros(16 * megabyte, np.uint8)
    during[::page] = 1
    del during
    assert 44 * megabyte < meter.peak_bytes() < 60 * megabyte
    assert held[0] == 1
