"""``per_sample=True``: every sample has its own step, its own acceptance and its own end.

One call of the field serves all samples. A sample that has arrived takes steps of size 0 until the last one has; what
it was given as neighbours changes none of its numbers.
"""

from __future__ import annotations

import math
from functools import reduce

import torch
from torch import Tensor

from hbnode.solvers import failures, forcing
from hbnode.solvers.limits import Limits, resolution
from hbnode.solvers.recorder import RecordedStep, StepRecorder
from hbnode.solvers.step_method import StepResult
from hbnode.solvers.step_size_control import SampleController, first_size
from hbnode.solvers.stepper import Stepper
from hbnode.solvers.time_grid import SampleStep, along_batch


class PerSample:
    """Where every sample is; tensors of shape (batch,)."""

    def __init__(self, stepper: Stepper, point: Tensor, intervals: range) -> None:
        self.stepper, self.point, self.first, self.last = stepper, point, intervals.start, intervals.stop
        self.rows = stepper.method.state_rows
        self.batch_dim = stepper.grid.batch_dim
        batch = point.shape[self.batch_dim + 1]
        t = stepper.grid.t.detach()
        self.t = t if t.dim() == 2 else t.expand(batch, -1)  # (batch, T)
        self.index = torch.arange(batch, device=t.device)
        self.interval = torch.full((batch,), self.first, device=t.device)
        self.start = torch.zeros(batch, dtype=torch.float64, device=t.device)
        self.failures = torch.zeros_like(self.interval)
        self.outputs = point[: self.rows].unsqueeze(0).repeat(len(intervals) + 1, *[1] * point.dim())
        self.controller = SampleController(stepper.method.error_order, self.start)
        self.norm = stepper.norms(point.detach().double())
        size = first_size(self.norm[0], self.norm[-1], stepper.rtol, stepper.atol, stepper.method)
        self.not_finite = ~torch.isfinite(self.norm).all(0)  # samples whose start is not
        size = torch.where(torch.isfinite(size), size, self.length())
        self.longest = torch.full_like(size, stepper.max_step)
        self.strictness = torch.ones_like(size)
        if stepper.sees_time:
            ends = (self.first, self.last) if stepper.interrupted else (0, -1)
            span = (self.t[:, ends[1]] - self.t[:, ends[0]]).abs()
            size, longest = forcing.limited(stepper, point, self.first, self.norm, span, size)
            self.longest = torch.minimum(self.longest, longest)
            self.strictness = torch.where(torch.isfinite(longest), stepper.method.inside, 1.0)
        if stepper.options.first_step:
            size = torch.full_like(size, stepper.options.first_step)
        self.size = torch.minimum(size, self.longest)  # of the step that each would like to take
        self.knots = KnotsAhead(self.t, stepper.knots, stepper.most_knots)
        self.stop, self.left = self.steps_left()

    def length(self) -> Tensor:
        """Of the interval that each sample is in."""
        index = self.interval.clamp(max=self.last - 1)
        return (self.t[self.index, index + 1] - self.t[self.index, index]).abs()

    def steps_left(self) -> tuple[Tensor, Tensor]:
        """Where each next stops, a fraction of its interval, and in how many equal steps."""
        length = self.length()
        stop = torch.ones_like(self.start)
        if self.knots:
            index = self.interval.clamp(max=self.last - 1)
            begin = self.t[self.index, index]
            now = torch.lerp(begin, self.t[self.index, index + 1], self.start)
            stop = ((self.knots.next_stop(now, self.size) - begin).abs() / length).clamp(max=1.0)
        left = torch.ceil((stop - self.start) * length / self.size - 0.05).clamp(min=1.0)
        return stop, left

    def run(self, recorder: StepRecorder | None, differentiable: bool) -> Tensor:
        """Step until all samples have arrived; one synchronisation a step."""
        stepper, running = self.stepper, self.last > self.first and len(self.index) > 0
        uneven, limits = stepper.sees_time, Limits(stepper)
        whole = None
        if stepper.interrupted and running and self.start.is_cpu:  # elsewhere it would cost more to ask than to compute
            whole = self.first if bool((self.left <= 1.0).all()) else None
        while running:
            done = self.interval >= self.last
            fraction = torch.where(done, 0.0, (self.stop - self.start) / self.left)
            if uneven:
                fraction = torch.where(self.left > 1.0, forcing.UNEVEN * fraction, fraction)
            interval, start = self.interval.clamp(max=self.last - 1), torch.where(done, 1.0, self.start)
            step = SampleStep(interval, start, fraction, whole)
            limits.count_attempt(step)
            if recorder is None:
                stepped = stepper.take(self.point, step, error=True, differentiable=differentiable)
            else:
                stepped = recorder.take_again(self.point, step, error=True)
            ratio = self.ratio(stepped)
            if whole is not None and bool((ratio <= 1.0).all()):  # all that follows is to no purpose
                stepper.tally.add("accepted")
                stepper.report(step, accepted=True)
                return stepped.point[None, : self.rows]
            whole, uneven = None, False
            step.accepted = (ratio <= 1.0) & ~done
            step.reached = step.accepted & (self.left <= 1.0) & (self.stop == 1.0)
            before, moves = self.point, along_batch(step.accepted, self.point, self.batch_dim)
            self.point = torch.where(moves, stepped.point, self.point)
            self.write(step)
            self.advance(step, ratio, done)
            running = self.go_on(step, before, recorder)
        return self.outputs

    def ratio(self, stepped: StepResult) -> Tensor:
        """Norm of (error / tolerance) of each sample."""
        pieces = self.stepper.scaled_error(stepped, self.point)
        norms = (self.stepper.norms(piece.double()).square().mean(0).sqrt() for piece in pieces)
        ratio = self.strictness * reduce(torch.maximum, norms)
        return torch.where(torch.isfinite(ratio), ratio, math.inf)

    def write(self, step: SampleStep) -> None:
        """Put the samples that have reached an output time into the outputs."""
        state = self.point[: self.rows].movedim(self.batch_dim + 1, 0)
        outputs = self.outputs.movedim(self.batch_dim + 2, 1)
        index = step.interval + 1 - self.first
        old = outputs[index, self.index]
        new = torch.where(step.reached.view(-1, *[1] * (state.dim() - 1)), state, old)
        written = outputs.index_put((index, self.index), new)
        self.outputs = written.movedim(1, self.batch_dim + 2)

    def advance(self, step: SampleStep, ratio: Tensor, done: Tensor) -> None:
        """Choose the next steps."""
        taken = step.size * self.length()
        factor = self.controller.factor(ratio, step.accepted | done)
        moving = ~done & (taken > 0)
        self.size = torch.where(moving, torch.minimum(taken * factor, self.longest), self.size)
        self.failures = torch.where(torch.isfinite(ratio) | done, 0, self.failures + 1)
        self.knots.reject(~step.accepted & ~done)
        end = torch.where(self.left <= 1.0, self.stop, self.start + step.size)
        self.start = torch.where(step.accepted, end, self.start)
        self.start = torch.where(step.reached, 0.0, self.start)
        self.interval = torch.where(step.reached, self.interval + 1, self.interval)
        before = self.stop
        self.stop, left = self.steps_left()
        shorter = ~step.accepted & (self.stop == before)  # a rejected step must become shorter
        self.left = torch.maximum(left, torch.where(shorter, self.left + 1.0, 1.0))

    def go_on(self, step: SampleStep, before: Tensor, recorder: StepRecorder | None) -> bool:
        """Count, record, and stop a solve that has run away; all that the host must know, in one transfer."""
        stepper = self.stepper
        now = torch.lerp(self.t[self.index, step.interval], self.t[self.index, step.interval + 1], step.start)
        floor = 4 * resolution(stepper) * now.abs()
        small = ~step.accepted & (self.size < floor.clamp(min=max(stepper.options.min_step, 1e-300)))
        small = small & (self.interval < self.last)
        stuck = (self.failures >= failures.NON_FINITE_ATTEMPTS) | (small & (self.failures > 0))
        done = (self.interval >= self.last).all()
        flags = (step.accepted.any(), small.any(), stuck.any(), done, self.not_finite.any())
        moved, underflow, failed, finished, bad_start = torch.stack(flags).tolist()
        if bad_start:
            sample = int(self.not_finite.nonzero()[0])
            failures.check_start(
                stepper, self.norm[:, sample].tolist(), min(self.first, stepper.grid.count - 1), sample
            )
        stepper.tally.add("accepted" if moved else "rejected")
        stepper.report(step, accepted=step.accepted)
        if moved and recorder is not None:
            recorder.steps.append(RecordedStep(step, before))
        if failed:
            raise failures.non_finite(stepper, before, step, sample=int(stuck.nonzero()[0]))
        if underflow:
            sample = int(small.nonzero()[0])
            raise failures.underflow(stepper, step, float(self.size[sample]), sample)
        return not finished


class KnotsAhead:
    """The knots of signals before each sample, with as many that one step may pass.

    Arguments:
        t: times (batch, T) of the solve.
        knots: in increasing order.
        most: how many one step may pass.
    """

    def __init__(self, t: Tensor, knots: list[float], most: int) -> None:
        self.count = len(knots)
        if not knots:
            return
        self.sign = torch.where(t[:, -1] >= t[:, 0], 1.0, -1.0).to(t)
        rising = t.new_tensor([*knots, math.inf])
        falling = t.new_tensor([*(-knot for knot in reversed(knots)), math.inf])
        self.ahead = torch.where(self.sign.unsqueeze(1) > 0, rising, falling)  # in the direction of the solve
        self.most = torch.full((len(t),), most, device=t.device)
        self.passed = torch.zeros_like(self.most)  # by the steps that were chosen
        self.rounding = 8 * torch.finfo(t.dtype).eps * t.abs().amax(1)

    def __bool__(self) -> bool:
        return self.count > 0

    def next_stop(self, now: Tensor, size: Tensor) -> Tensor:
        """The furthest knot in reach of a step, the next one if none is, or infinity."""
        now = self.sign * now
        first = self._passed_at(now + self.rounding)
        last = torch.maximum(self._passed_at(now + 1.05 * size), first + 1)
        last = torch.minimum(last, first + 1 + self.most)
        self.passed = last - first - 1
        return self.sign * self.ahead.gather(1, (last - 1).clamp(max=self.count).unsqueeze(1)).squeeze(1)

    def reject(self, rejected: Tensor) -> None:
        """Pass fewer after a step that was rejected."""
        if self:
            fewer = (self.passed - 1).clamp(min=0)
            self.most = torch.where(rejected, torch.minimum(self.most, fewer), self.most)

    def _passed_at(self, time: Tensor) -> Tensor:
        return torch.searchsorted(self.ahead, time.unsqueeze(1), right=True).squeeze(1)
