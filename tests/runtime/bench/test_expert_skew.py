"""The skew case: the checkpoint routes as it says, and the figures are sums over steps and layers."""

import numpy as np
import pytest
from safetensors.numpy import load_file

from runtime.bench.expert_skew import EXPERTS, HOT_SHARE, LAYERS, SkewRun, skew_config, write_skewed_model
from runtime.model.architecture import load_architecture


def test_four_fifths_of_the_tokens_go_to_three_experts_that_every_layer_names_differently(tmp_path):
    write_skewed_model(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    x = tensors["model.embed_tokens.weight"]
    hot = []
    for layer in range(LAYERS):
        logits = x @ tensors[f"model.layers.{layer}.mlp.gate.weight"].T
        rows = np.bincount(np.argsort(-logits, axis=1)[:, :2].ravel(), minlength=EXPERTS)
        busiest = np.argsort(-rows)[:3]
        assert rows[busiest].sum() / rows.sum() == pytest.approx(HOT_SHARE, abs=0.02)
        hot.append(frozenset(busiest.tolist()))
    assert len(set(hot)) == LAYERS


def test_the_checkpoint_is_one_that_the_server_reads(tmp_path):
    write_skewed_model(tmp_path)
    arch = load_architecture(tmp_path)
    assert (arch.num_layers, arch.num_experts) == (LAYERS, EXPERTS)
    assert skew_config(8, 2, 64).parallel.redundant_experts == 16


def test_the_figures_are_of_the_busiest_device_of_every_layer_and_step():
    rows = np.array([[[3, 1], [0, 4]], [[2, 2], [5, 1]]])  # [steps, layers, devices]
    tokens = np.array([[4, 3, 2, 1], [10, 0, 0, 0]])
    run = SkewRun(rows, tokens, ((1,),), 0)
    assert run.critical_rows == 3 + 4 + 2 + 5
    assert run.least_rows == 2 + 2 + 2 + 3
    assert run.hot_share == pytest.approx(19 / 20)
