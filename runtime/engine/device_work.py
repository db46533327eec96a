"""DeviceWork: owns the arrays on this process's devices and carries out commands on them, through compiled steps only.

Everything that a step replaces is donated, so the arrays held here are always the newest. On several hosts each has
one, whose arrays are this host's parts of the same global arrays.
"""

from dataclasses import replace
from typing import Any

import jax
import numpy as np

from runtime.engine.device_commands import (
    CompileRungs,
    DeviceCommand,
    KeepRungs,
    LeanRouter,
    MoveWeights,
    RunStep,
    ScorePrompt,
    SetBalanceWeight,
    SetMask,
    SetSlots,
    WakeWeights,
    WriteRow,
)
from runtime.engine.device_state import DeviceState
from runtime.experts.weights import MoEParams
from runtime.ladder.compiler import MOVE_EXPERT, WAKE_EXPERT, StepCompiler, sampler_name
from runtime.mesh import DeviceMesh
from runtime.model.params import with_router_bias, with_slots
from runtime.model.sampling import RowRecord


class DeviceWork:
    """Not thread-safe: one thread owns it."""

    def __init__(self, compiler: StepCompiler, state: DeviceState, mesh: DeviceMesh | None) -> None:
        self.compiler, self.state, self.mesh = compiler, state, mesh
        self._router_bias: dict[int, np.ndarray] = {}  # the checkpoint's own, of layers that have leant

    @property
    def first_expert_layer(self) -> int:
        layers = self.state.params.layers
        return next(i for i, layer in enumerate(layers) if isinstance(layer.ffn, MoEParams))

    def run(self, command: DeviceCommand) -> Any:
        """What the command yields for the host to read; launched, not waited for.

        RunStep yields (StepOutput or None, ExpertLoad), ScorePrompt its three arrays, the others None. Raises
        CompileFailed where a step is not there, ValueError where a layer has no experts.
        """
        match command:
            case RunStep():
                return self._run_step(command)
            case WriteRow():
                self._write_row(command)
            case SetMask(slot, mask):
                self.state.sampling = self.compiler.call("set_mask", self.state.sampling, slot, mask)
            case ScorePrompt(offset, targets):
                return self.compiler.call("score", self.state.params, self.state.hidden, offset, targets)
            case MoveWeights():
                self._move(command)
            case SetBalanceWeight(weight):
                assert self.mesh is not None
                share = self.mesh.put(np.array(weight, np.float32))
                self.state.params = replace(self.state.params, balance_weight=share)
            case LeanRouter(layer, bias):
                self._lean(layer, bias)
            case WakeWeights():
                self._wake(command)
            case SetSlots(layer, table):
                self.state.params = with_slots(self.state.params, layer, jax.device_put(table))
            case CompileRungs(buckets):
                self.compiler.compile(buckets)
            case KeepRungs(buckets):
                self.compiler.forget_all_but(buckets)
        return None

    def _run_step(self, step: RunStep) -> Any:
        s, call = self.state, self.compiler.call
        if not step.is_prefill:
            s.pool, s.rows, s.sampling, output, load = call(
                step.name, s.params, s.pool, s.rows, s.sampling, step.packed
            )
            return output, load
        s.pool, s.hidden, prefilled, load = call(step.name, s.params, s.pool, s.hidden, step.packed)
        output = None
        if step.sample_rows:
            s.rows, s.sampling, output = call(sampler_name(step.sample_rows), s.rows, s.sampling, prefilled)
        return output, load

    def _write_row(self, row: WriteRow) -> None:
        s, call = self.state, self.compiler.call
        s.rows = call("start_row", s.rows, row.slot, np.int32(row.budget))
        s.sampling = call("set_row", s.sampling, row.slot, RowRecord(row.floats, row.ints))
        if row.dense:
            s.sampling = call("set_dense_row", s.sampling, row.slot, *row.dense)

    def _lean(self, layer: int, bias: np.ndarray) -> None:
        """A layer without experts has nothing that could lean."""
        ffn = self.state.params.layers[layer].ffn
        assert self.mesh is not None
        if not isinstance(ffn, MoEParams):
            return
        if layer not in self._router_bias:  # read once: that waits for the device
            self._router_bias[layer] = np.asarray(ffn.router_bias)
        biased = self.mesh.put(self._router_bias[layer] + bias)
        self.state.params = with_router_bias(self.state.params, layer, biased)

    def _move(self, move: MoveWeights) -> None:
        """Copy experts' weights to other slots, in place, and put the table of copies that names them there."""
        ffn = self.experts(move.layer)
        moved = self.compiler.call(MOVE_EXPERT, ffn.w_gate_up, ffn.w_down, ffn.copies, move.order)
        self._replace(move.layer, *moved)

    def _wake(self, wake: WakeWeights) -> None:
        """Copy an expert from the store over a slot, in place; the tables of slots are `SetSlots`'s business."""
        ffn = self.experts(wake.layer)
        numbers = np.int32(wake.expert), np.int32(wake.slot)
        gate_up, down = self.compiler.call(WAKE_EXPERT, ffn.w_gate_up, ffn.w_down, ffn.store, *numbers)
        self._replace(wake.layer, gate_up, down, ffn.copies)

    def experts(self, layer: int) -> MoEParams:
        ffn = self.state.params.layers[layer].ffn
        if not isinstance(ffn, MoEParams):
            raise ValueError(f"layer {layer} has no experts")
        return ffn

    def _replace(self, layer: int, gate_up: jax.Array, down: jax.Array, copies: jax.Array | None) -> None:
        layers = list(self.state.params.layers)
        ffn = replace(self.experts(layer), w_gate_up=gate_up, w_down=down, copies=copies)
        layers[layer] = replace(layers[layer], ffn=ffn)
        self.state.params = replace(self.state.params, layers=tuple(layers))
