"""A Keras step whose model is cut into pieces that lie on different devices."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any

from meshwright.cluster.channel import telling_of_compiling
from meshwright.cluster.identity import process_count
from meshwright.data.resident import Shapes
from meshwright.devices.containers import map_leaves
from meshwright.devices.memory import MemoryInUse
from meshwright.devices.placement_log import log_number, log_step
from meshwright.devices.runtime import usable_memory
from meshwright.devices.settings import current_settings
from meshwright.devices.sizes import format_bytes
from meshwright.devices.step import StepState, batch_size, variables_of
from meshwright.devices.strategy_hooks import TraceHooks, tracing
from meshwright.errors import StrategyError
from meshwright.models.parts import bytes_of, split_program
from meshwright.models.stages import Input, Role
from meshwright.parallel.batch import BatchSplit, PlacedBatch
from meshwright.parallel.mesh import gathered, placed_shape, replicated, sharding
from meshwright.parallel.microbatch import cut_up
from meshwright.parallel.plan import Plan
from meshwright.parallel.transfers import has_part
from meshwright.train.accumulation import why_not_a_mean
from meshwright.train.cut import Cut, Room
from meshwright.train.flow_ends import FlowEnds
from meshwright.train.piece_programs import PieceProgram
from meshwright.train.pieces import Pieces
from meshwright.train.pipeline_flow import Flow
from meshwright.train.pure_step import pure
from meshwright.train.stage_memory import (
    Options,
    StageMemory,
    memory_of_stages,
    refuse_stages_over_limit,
)
from meshwright.train.stage_update import StageUpdate
from meshwright.train.stage_variables import StageVariables
from meshwright.train.staged_steps import (
    ROLES,
    TRAIN,
    OutputsOf,
    StagedStep,
    trace_step,
    training_of,
)
from meshwright.train.whole_loss import WholeLoss

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding


class PipelineStep:
    """Runs a step of Keras' (train, test or predict) through the stages of a pipeline.

    Arguments:
        model: The model.
        step: Keras' step.
        plan: The plan.
        mesh: All devices.
        cut: Where the model is cut; its steps share it.
    """

    measures_kernels = False

    def __init__(self, model: Any, step: Any, plan: Plan, mesh: Mesh, cut: Cut) -> None:
        if not hasattr(step, "lower"):
            raise StrategyError(
                f"{model.name!r} was compiled with run_eagerly=True or "
                "jit_compile=False.",
                "A step over several devices is made of compiled programs.",
                "Compile the model without these, or train it on one device.",
            )
        self._trains = step.__name__ == "train_step"
        self._model = model
        self._name = step.__name__
        self._function = pure(model, step.__name__, step.__wrapped__)
        self._plan = plan
        self._cut = cut
        self._mesh = mesh
        self._state = StepState(model)
        self._newest: Any = None
        self._newest_pieces: list[Pieces] = []
        self.giving_back = self._state.giving_back
        self._outputs_of = OutputsOf(model)
        self._has_run = False
        self._start_anew()
        if self._trains:
            _refuse_own_step(model)

    def _start_anew(self) -> None:
        """Forgets what is known by the places of variables in their lists."""
        self._variables = StageVariables(self._model, self._plan, self._mesh, self._cut)
        self._places = self._places_of_variables()
        self.pieces = cache(self._pieces)
        self._update = cache(self._make_update)
        self._whole_loss = cache(self._make_whole_loss)
        self._why_no_mean = cache(self._find_why_no_mean)
        self._seen: set[Any] = set()
        self._ran: set[tuple[Shapes, ...]] = set()

    def _places_of_variables(self) -> list[list[int]]:
        return [[id(v) for v in group] for group in variables_of(self._model, ((), ()))]

    def put(self, data: Any) -> PlacedBatch:
        """A batch in microbatches; each goes to its stages when they need it."""
        size = batch_size(data)
        wanted = self._plan.microbatches if self._trains else 1
        kept = map_leaves(_keep, data)
        return PlacedBatch(size, cut_up(kept, size, wanted or 1))

    def __call__(self, state: Any, data: Any) -> Any:
        """Runs one step on a batch of any size; returns what Keras' step does."""
        batch = data if isinstance(data, PlacedBatch) else self.put(data)
        self._refuse_few_samples(batch.size)
        if state is not self._newest and self._places_of_variables() != self._places:
            self._start_anew()  # layers have been frozen, or are trained again
        shapes = [Shapes.of(each) for each in batch.arrays]
        is_new = tuple(shapes) not in self._ran
        self._ran.add(tuple(shapes))
        with telling_of_compiling(is_new):
            return self._run(state, batch, shapes)

    def _run(self, state: Any, batch: PlacedBatch, shapes: list[Shapes]) -> Any:
        pieces = [self.pieces(each) for each in shapes]
        state = self._lay_out(state)
        self._look(tuple(shapes), pieces, state, batch.size)
        if not self._trains:
            flow = Flow(self._variables, pieces, state, batch)
            self._follow_schedule(flow, pieces, only_forward=True)
            logs = FlowEnds(flow).logs()
            FlowEnds(flow).spread_metrics()
        elif self._is_by_outputs(shapes):
            flow, logs = self._train_by_outputs(pieces, state, batch)
        else:
            flow = Flow(self._variables, pieces, state, batch)
            self._follow_schedule(flow, pieces)
            logs = FlowEnds(flow).logs()
            flow.update(self._update())
            FlowEnds(flow).spread_metrics()
        self._newest, self._newest_pieces = flow.state(), pieces
        state = self._newest
        return logs, self._state.keep(state)

    def memory(self, state: Any, data: Any) -> list[StageMemory]:
        """What a training step on such a batch needs on each stage."""
        batch = self.put(data)
        pieces = [self.pieces(Shapes.of(each)) for each in batch.arrays]
        return self._memory(pieces, self._lay_out(state))

    def memory_in_use(self) -> MemoryInUse:
        """What the newest step takes on the devices of each stage, by kind."""
        if self._newest is None:
            return ()
        found = self._memory(self._newest_pieces, self._newest)
        meshes = self._variables.meshes
        return [
            (mesh.devices.flat, each.by_kind())
            for mesh, each in zip(meshes, found, strict=True)
        ]

    def memory_of_shapes(self, batch: Any, options: Options) -> list[StageMemory]:
        """Like `memory`, from the shapes of a batch; no value of the model is read.

        Arguments:
            batch: The shapes.
            options: What the compiler is told besides.
        """
        size, wanted = batch_size(batch), self._plan.microbatches or 1
        self._refuse_few_samples(size)
        parts = jax.eval_shape(partial(cut_up, size=size, wanted=wanted), batch)
        pieces = [self.pieces(Shapes.of(each)) for each in parts]
        shapes = self._state_shapes(len(TRAIN))
        groups = zip(self._places_of(shapes), shapes, strict=True)
        state = [list(map(placed_shape, values, places)) for places, values in groups]
        return self._memory(pieces, tuple(state), options)

    def _memory(
        self, pieces: list[Pieces], state: Any, options: Options = None
    ) -> list[StageMemory]:
        schedule = self._plan.schedule_of(len(pieces)) if self._trains else None
        return memory_of_stages(pieces[0], self._variables, state, schedule, options)

    def _look(
        self, shapes: tuple[Shapes, ...], pieces: list[Pieces], state: Any, size: int
    ) -> None:
        """Refuses a step over the limit, and logs it; once for all new shapes."""
        limit, logging = current_settings().memory_limit, log_number()
        if (shapes, limit, logging) in self._seen:
            return
        if limit is not None:
            what = f"{self._name} of {self._model.name!r} with a batch of {size}"
            if len(pieces) > 1:
                what += f" in {len(pieces)} microbatches"
            found = self._memory(pieces, state)
            refuse_stages_over_limit(found, limit, what, self._cut)
        if logging:
            variables = variables_of(self._model, state)
            log_step(self._model, self._name, variables, state)
        self._seen.add((shapes, limit, logging))

    def describe(self, data: Any) -> list[str]:
        """Which layers are in which stage, and what passes between them."""
        batch = self.put(data)
        pieces = self.pieces(Shapes.of(batch.arrays[0]))
        lines = [f"The model is cut where {self._cut.because}."]
        for piece, program in enumerate(pieces.programs):
            ends, names = program.ends, self._cut.layers[piece]
            carried = sum(bytes_of(v) for v in (*ends.active, *ends.passive))
            arrives = f"; {format_bytes(carried)} arrive with each microbatch"
            what = f"stage {pieces.stages[piece]}"
            if len(pieces.programs) > self._plan.stages:
                what = f"piece {piece} on {what}"
            lines.append(
                f"  {what}: {100 * self._cut.shares[piece]:.0f} % of the work"
                f"{arrives if piece else ''}: {', '.join(names)}"
            )
        return lines

    def stage_of(self, variable: Any) -> int | None:
        """The stage that a variable of the model lives on."""
        lists: dict[Role, Any] = {
            "weight": self._model.trainable_variables,
            "state": self._model.non_trainable_variables,
        }
        for role, variables in lists.items():
            for i, each in enumerate(variables):
                if each is variable:
                    return self._variables.stage(Input(role, i))
        return None

    def _follow_schedule(
        self, flow: Flow, pieces: list[Pieces], only_forward: bool = False
    ) -> None:
        """Does the actions of a schedule, tick by tick.

        Arguments:
            flow: The step.
            pieces: The pieces of each microbatch.
            only_forward: Whether only the forward passes are wanted, without gradients.
        """
        for actions in self._cut.ticks(len(pieces), pieces[0].phases):
            if only_forward:
                forward = [(p, m) for kind, p, m in actions if kind == "forward"]
                actions = [("forward_only", p, m) for p, m in forward]
            flow.fetch(actions)
            flow.act(actions)

    def _train_by_outputs(
        self, pieces: list[Pieces], state: Any, batch: PlacedBatch
    ) -> tuple[Flow, Any]:
        """Goes forward twice: first for the loss of the whole batch."""
        first = Flow(self._variables, pieces, state, batch)
        self._follow_schedule(first, pieces, only_forward=True)
        before, last = FlowEnds(first), self._last_mesh
        loss = self._whole_loss(before.microbatch_shapes())
        read = [before.read(each, last) for each in loss.reads]
        metrics = [before.read(Input("metric", i), last) for i in range(len(state[3]))]
        microbatches = before.microbatches()
        found = loss(read, metrics, microbatches) if has_part(last) else None
        starts = before.gradients_at_home(found and found.outputs)
        flow = Flow(self._variables, pieces, state, batch, starts)
        self._follow_schedule(flow, pieces)
        trained = [each for each in loss.reads if each.role == "weight"]
        weights = found.weights if found else [None] * len(trained)
        flow.add_gradients_of_loss(dict(zip(trained, weights, strict=True)))
        flow.update(self._update())
        shapes, after = loss.shapes, FlowEnds(flow)
        metrics = after.spread_from_last(found and found.metrics, shapes.metrics)
        flow.take_metrics(metrics)
        return flow, after.spread_from_last(found and found.logs, shapes.logs)

    def _make_whole_loss(self, shapes: tuple[Shapes, ...]) -> WholeLoss:
        return WholeLoss(
            self._model,
            self._outputs_of.template,
            self._state_shapes(4),
            [each.tree for each in shapes],
            self._last_mesh,
        )

    @property
    def _last_mesh(self) -> Mesh:
        return self._variables.meshes[-1]

    def _is_by_outputs(self, shapes: list[Shapes]) -> bool:
        """Whether the loss of a batch is no mean of those of its microbatches."""
        has_several = self._trains and self._plan.microbatches != 1
        return has_several and self._why_no_mean(shapes[0]) is not None

    def _find_why_no_mean(self, shapes: Shapes) -> str | None:
        return why_not_a_mean(self._model, self._state_shapes(4), shapes.tree)

    def _refuse_few_samples(self, size: int) -> None:
        """A tail may be small, but not the first batch."""
        wanted = self._plan.microbatches or 1
        if not self._has_run and self._trains and size < wanted:
            raise StrategyError(
                f"A batch of {size} samples was to be cut into {wanted} microbatches.",
                "A microbatch has a sample at least.",
                f"Use a batch size of at least {wanted}, or microbatches={size}.",
            )
        self._has_run = True

    def _lay_out(self, state: Any) -> Any:
        """The state where it belongs; what a step has put out is there already."""
        if state is self._newest:
            return state
        laid_out = []
        groups = variables_of(self._model, state), state, self._places_of(state)
        for variables, values, places in zip(*groups, strict=True):
            for variable, place in zip(variables, places, strict=True):
                self._cut.mark(variable, place)
            pairs = zip(values, places, strict=True)
            laid_out.append([_put(value, place) for value, place in pairs])
        return tuple(laid_out)

    def _places_of(self, state: Any) -> list[list[NamedSharding]]:
        """Where the state belongs, list by list."""
        groups = zip(ROLES[len(state)], variables_of(self._model, state), strict=True)
        return [
            [self._variables.place(Input(role, i), v) for i, v in enumerate(variables)]
            for role, variables in groups
        ]

    def _pieces(self, shapes: Shapes) -> Pieces:
        step = self._trace(shapes.tree)
        owners, stages, phases = self._cut.assign(step.staged, self._room)
        parts = split_program(step.staged.program, owners, len(stages))
        size = _num_samples(shapes.tree)
        meshes = [self._variables.meshes[stage] for stage in stages]
        programs = [
            PieceProgram(
                step.staged,
                part,
                mesh,
                size,
                partial(self._place, step, mesh, size),
                self._plan.remat,
            )
            for part, mesh in zip(parts, meshes, strict=True)
        ]
        return Pieces(step, programs, stages, phases)

    @property
    def _room(self) -> Room | None:
        """What the device with the least memory has room for."""
        devices = self._variables.mesh.devices.flat
        known = [usable_memory(device) for device in devices]
        limits = [each for each in known if each is not None]
        if not limits:
            return None
        weights = sum(_bytes_of(v) for v in self._model.trainable_variables)
        optimizer = getattr(self._model, "optimizer", None)
        slots = sum(_bytes_of(v) for v in optimizer.variables) if optimizer else 0
        return Room(min(limits), 2 + slots / max(weights, 1))

    def _place(
        self, step: StagedStep, mesh: Mesh, size: int, kind: str, number: int
    ) -> NamedSharding:
        """Where an input or output of the step lies on the devices of a piece."""
        staged = step.staged
        source = number if kind == "input" else staged.updates[number]
        if source is not None:
            given = staged.inputs[source]
            return sharding(mesh, self._variables.spec(self._variable(given)))
        v = staged.program.jaxpr.outvars[number]
        has_samples = bool(v.aval.shape) and v.aval.shape[0] == size
        if self._variables.mesh.is_multi_process and not self._trains:
            return replicated(mesh)  # every process reads the outputs
        return BatchSplit(size, mesh).placement() if has_samples else replicated(mesh)

    def _variable(self, given: Input) -> Any:
        lists = {
            "weight": self._model.trainable_variables,
            "state": self._model.non_trainable_variables,
            "metric": self._model.metrics_variables,
        }
        return lists[given.role][given.index]

    def _trace(self, batch: Any) -> StagedStep:
        size = _num_samples(batch)
        roles = TRAIN if self._trains else ROLES[self._num_lists]
        state = self._state_shapes(len(roles))
        run, returned = self._traceable(batch, roles)

        def traced(state: Any, batch: Any) -> Any:
            ready = self._gather(list(state[:2]))
            with self._keeping(size), self._cut.tracing():
                starts, logs, lists = run((*ready, *state[2:]), batch)
            return starts, logs, _ungathered(lists, ready, state[:2])

        return trace_step(traced, roles, returned, state, batch)

    def _traceable(
        self, batch: Any, roles: tuple[Role, ...]
    ) -> tuple[Callable[..., Any], tuple[Role, ...]]:
        """What of the step goes through the pieces, and the lists that it returns."""
        if not self._trains:
            return self._whole_step, roles
        if self._is_by_outputs([Shapes.of(batch)]):
            return self._outputs_of, ("state",)
        return training_of(self._model), ("state", "metric")

    def _whole_step(self, state: Any, batch: Any) -> Any:
        logs, lists = self._function(state, batch)
        return None, logs, tuple(list(each) for each in lists)

    @property
    def _num_lists(self) -> int:
        return 2 if self._name == "predict_step" else 3

    def _state_shapes(self, num_lists: int) -> Any:
        groups = variables_of(self._model, [()] * num_lists)
        return tuple([_shape_of(v) for v in group] for group in groups)

    @property
    def _template(self) -> Mesh:
        """The devices that steps are traced for, and replaced in each piece."""
        return self._variables.meshes[0]

    def _gather(self, lists: Any) -> Any:
        if self._template.size == 1:
            return lists
        groups = variables_of(self._model, [(), ()])
        places = [
            [gathered(sharding(self._template, self._variables.spec(v))) for v in group]
            for group in groups
        ]
        return jax.lax.with_sharding_constraint(lists, places)

    def _keeping(self, size: int) -> AbstractContextManager[None]:
        if self._template.size == 1:
            return nullcontext()
        split = BatchSplit(size, self._template)
        keep, number = self._keep_gathered, self._template.size
        return tracing(TraceHooks(split.keep, keep, split.apply, number))

    def _keep_gathered(self, variable: Any, value: Any) -> Any:
        place = sharding(self._template, self._variables.spec(variable))
        return jax.lax.with_sharding_constraint(value, gathered(place))

    def _make_update(self) -> StageUpdate:
        weights, _, slots, _ = self._state_shapes(4)
        known, model = self._variables, self._model
        lists: dict[Role, Any] = {
            "weight": model.trainable_variables,
            "shared": model.optimizer.variables,
        }

        def place(given: Input) -> NamedSharding:
            return known.place(given, lists[given.role][given.index])

        homes = [known.stage(Input("weight", i)) for i in range(len(weights))]
        return StageUpdate(
            model.optimizer,
            slots,
            weights,
            [known.stage(Input("shared", i)) for i in range(len(slots))],
            [home for home in homes if home is not None],
            known.meshes,
            known.mesh,
            place,
        )


def _refuse_own_step(model: Any) -> None:
    import keras

    if type(model).train_step is not keras.Model.train_step:
        raise StrategyError(
            f"{model.name!r}, whose class {type(model).__name__} has a train_step of "
            "its own, was to be trained in pieces on several devices.",
            "Pieces replace the training step, so it would not be called.",
            "Override compute_loss instead of train_step, or train the model whole: "
            "under Mirrored, FSDP or TensorParallel, or on one device.",
        )


def _keep(array: Any) -> Any:
    """An array that nobody changes until it is used; NumPy's may be a user's buffer."""
    is_whole = isinstance(array, jax.Array) and array.is_fully_addressable
    return array if is_whole and process_count() == 1 else np.array(array)


def _put(value: Any, where: NamedSharding) -> Any:
    if isinstance(value, jax.Array) and value.sharding == where:
        # What Keras assigned to all processes has shards that JAX cannot tell apart.
        is_among_all = not where.is_fully_addressable and where.addressable_devices
        return jax.jit(_same, out_shardings=where)(value) if is_among_all else value
    if process_count() == 1:
        return jax.device_put(value, where)
    from jax.experimental import multihost_utils

    # Every process made its own; the first one's counts.
    host = np.asarray(multihost_utils.broadcast_one_to_all(np.asarray(value)))
    given = host.__getitem__
    return jax.make_array_from_callback(host.shape, where, given, dtype=host.dtype)


def _ungathered(lists: Any, ready: Any, before: Any) -> Any:
    """What a step returns, with variables that it did not change as they were."""
    pairs = zip(jax.tree.leaves(ready), jax.tree.leaves(before), strict=True)
    known = {id(gathered): value for gathered, value in pairs}
    return jax.tree.map(lambda value: known.get(id(value), value), lists)


def _same(value: Any) -> Any:
    return value


def _shape_of(variable: Any) -> jax.ShapeDtypeStruct:
    held = variable if variable._value is None else variable._value
    return jax.ShapeDtypeStruct(tuple(held.shape), held.dtype)


def _bytes_of(variable: Any) -> int:
    shape = _shape_of(variable)
    return int(np.prod(shape.shape, dtype=np.int64)) * int(shape.dtype.itemsize)


def _num_samples(batch: Any) -> int:
    return next(leaf.shape[0] for leaf in jax.tree.leaves(batch) if leaf.shape)
