"""The parts of the console's Experts page, as pydantic types: where experts sit, and which of them sleep. Wire format only."""

from control_plane.wire import Part, Wire


class LoadForecast(Wire):
    """Who forecasts the experts' load of the next window, and what traffic it is for.

    errors: of late by source, a distance in [0, 1]. next_traffic: shares of the largest traffic keys, which callers choose, so
    they are strangers' words; num_keys counts all. Empty where no request says its key.
    """

    source: str
    errors: dict[str, float] = {}
    next_traffic: dict[str, float] = {}
    num_keys: int = 0


class Placement(Part):
    """Where experts sit. Not available on one device.

    Imbalance is the busiest device over the mean of the devices, mean over layers; 1 is even. `before` is of the two
    minutes at most before experts moved last, `after` of those at most since; null (loads: empty) where nothing was computed.
    device_loads: rows of a device over the mean of the devices, all layers together.
    """

    num_devices: int = 1
    slots_per_device: int = 0
    num_copies: int = 0  # replicas beside the first of each expert
    copies: list[list[int]] = []  # [layer][expert]: slots that hold it, 1 at least
    moves_in_flight: int = 0  # ordered, not yet applied
    num_moved: int = 0  # since the start
    plan_age_s: float | None = None  # since the last moves began; null: none has been made
    imbalance_now: float | None = None  # of the engine's last window
    imbalance_before: float | None = None
    imbalance_after: float | None = None
    device_loads_before: list[float] = []
    device_loads_after: list[float] = []
    device_tokens: list[int] = []  # of the span, all layers
    device_rows: list[list[int]] = []  # [layer][device], of the span
    is_paused: bool = False  # nothing moves by itself
    pinned_layers: list[int] = []
    why: str = ""  # why experts move or do not, in one word of docs/experts.md
    alarm: str | None = None  # a sentence while a plan is overdue
    forecast: LoadForecast | None = None  # null before the first window


class Residency(Part):
    """Experts that sleep. Not available where all experts are resident.

    A row is a token times an expert that it was routed to. `*_now` figures are of the last 30 to 60 s, the others of the
    page's span; null where no step was made. Fetches are copies of an asleep expert for the step at hand: late, which a
    layer waited for, or ahead (prefetched), used or in vain.
    """

    num_slots: int = 0  # of a layer
    num_experts: int = 0  # of a layer
    layers: list[int] = []  # those that have experts
    num_resident: int = 0  # all layers; below num_slots times layers where slots are free
    hit_share_now: float | None = None  # rows whose expert was resident, over all rows
    hit_share: float | None = None
    layer_hit_shares: list[float | None] = []  # by layer of `layers`
    late_fetches_step: float | None = None
    late_fetches_step_now: float | None = None
    prefetches_used_step: float | None = None
    prefetches_unused_step: float | None = None
    changes: dict[str, int] = {}  # by reason (docs/experts.md): woke, evicted, slept, kept_by_hysteresis
    device_bytes: int = 0  # of the slots
    host_bytes: int = 0  # of the store, which holds all experts
    resident: list[list[int]] = []  # [layer of `layers`][expert]: 1 resident, 0 asleep
