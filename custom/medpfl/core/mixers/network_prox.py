# SPDX-License-Identifier: Apache-2.0
"""pFedNet's personal part: hospitals that are neighbours in a network of similarity are drawn together.

Zhao, Liu, Liu, Liu, He, "Medical Federated Model with Mixture of Personalized and Shared Components", Section V-B.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from medpfl.core import graph as graphs
from medpfl.core.errors import ConfigError
from medpfl.core.graph import Edges
from medpfl.core.mapped import pieces
from medpfl.core.mixers.contract import Mixer, RoundInfo
from medpfl.core.mixing import Matrix, State, mix
from medpfl.core.network_lasso import gram, solve_gram, solve_stack

_EDGES = "edges"


@dataclass(frozen=True)
class NetworkProx(Mixer):
    """Z+ = argmin 1/2 |Z - V|^2 + tau sum over edges of |z_i - z_j|_p, from V = (1 - s) Z_t + s Z_local.

    tau = 0 leaves every hospital its V; tau large enough gives every connected part of the network its mean. Hospitals
    without edges, and those that did not answer, keep their own. The mean of all models never changes. For p = 2 the
    result is a mix of the V by a symmetric doubly stochastic K x K matrix, found from the models' Gram matrix.

    The paper's Eq. (3) with eta, lambda and N hospitals is this with tau = eta * lambda and s = 1 / N; its Algorithm 4
    with rho and K is ``solver`` "paper" with eta times that rho and ``iterations`` = K.

    Args:
        tau: strength, in units of the models' distances, >= 0.
        s: how far V goes from what the hospitals were sent to what they made of it, in (0, 1].
        p: norm of the differences: 1, 2 or "inf".
        graph: "knn" (every hospital's nearest by ``sketch``, either way round), "complete", "star", "empty" or "given".
        neighbours: of "knn", >= 1. As many as there are other hospitals, or more: the graph is complete, and no
            sketch is asked for.
        sketch: what a hospital tells of its data for "knn", once: "moments" (mean and variance of every feature),
            "labels" (the classes' shares) or "covariance" (mean and covariance of the features).
        centre: hospital in the middle of the "star".
        edges: pairs of hospitals' names, for "given".
        rho: penalty parameter of ADMM, > 0.
        iterations: at most so many, >= 1.
        solver: "exact", to a relative error of 1e-6 if the iterations allow, or "paper": the literal Algorithm 4, just
            so many iterations on the models themselves; its Eq. (9) with the right proximal operator for p = 1 and inf.
    """

    tau: float
    s: float = 1.0
    p: Literal[1, 2, "inf"] = 2
    graph: Literal["knn", "complete", "star", "empty", "given"] = "knn"
    neighbours: int = 3
    sketch: Literal["moments", "labels", "covariance"] = "moments"
    centre: str | None = None
    edges: tuple[tuple[str, str], ...] | None = None
    rho: float = 0.5
    iterations: int = 500
    solver: Literal["exact", "paper"] = "exact"

    apart: ClassVar = "(less its own part) to its only neighbour in the network, where that has no other"

    _known: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)
    """The graph, once the sketches made it."""

    def __post_init__(self) -> None:
        if self.tau < 0:
            raise ConfigError(f"NetworkProx's tau must be at least 0, got {self.tau}")
        if not 0 < self.s <= 1:
            raise ConfigError(f"NetworkProx's s must be in (0, 1], got {self.s}")
        if self.rho <= 0:
            raise ConfigError(f"NetworkProx's rho must be above 0, got {self.rho}")
        for name in ("neighbours", "iterations"):
            if getattr(self, name) < 1:
                raise ConfigError(f"NetworkProx's {name} must be at least 1, got {getattr(self, name)}")
        for name, kind in (("edges", "given"), ("centre", "star")):
            if (getattr(self, name) is not None) != (self.graph == kind):
                raise ConfigError(f"NetworkProx's {name} belongs to the graph '{kind}', and '{kind}' needs it")
        if self.edges is not None:  # FLARE gives JSON's lists
            object.__setattr__(self, "edges", tuple(tuple(pair) for pair in self.edges))

    @property
    def remembers(self) -> Literal["copies"] | None:
        return "copies" if self.s < 1 else None

    def check(self, roster: Sequence[str]) -> None:
        if self.graph == "given":
            graphs.named(self.edges or (), roster)
        if self.graph == "star" and self.centre not in roster:
            raise ConfigError(f"NetworkProx's centre '{self.centre}' is not in {', '.join(roster)}")

    def start(self, state: State) -> None:
        self._known.clear()

    def wants(self, round_number: int, hospitals: int) -> str | None:
        """The sketch, once; never where everybody's neighbours are all others, whatever the sketches say."""
        decides = self.graph == "knn" and self.neighbours < hospitals - 1
        return self.sketch if decides and _EDGES not in self._known else None

    def check_statistics(self, statistics: State) -> None:
        graphs.check_sketch(self.sketch, statistics)

    def take_statistics(self, statistics: Sequence[State | None], info: RoundInfo) -> None:
        points = graphs.points_of(self.sketch, statistics, info.sizes)
        self._known[_EDGES] = torch.from_numpy(graphs.nearest(points, self.neighbours))

    def network(self, roster: Sequence[str]) -> Edges:
        """The graph's M x 2 edges, as indices into the roster."""
        if _EDGES in self._known:
            edges: Edges = self._known[_EDGES].numpy()
            return edges
        if self.graph == "given":
            return graphs.named(self.edges or (), roster)
        if self.graph in ("complete", "knn"):
            return graphs.complete(len(roster))
        return graphs.star(len(roster), roster.index(self.centre)) if self.centre else graphs.unique([])

    def links(self, roster: Sequence[str]) -> list[tuple[str, str]] | None:
        return [(roster[i], roster[j]) for i, j in self.network(roster)]

    def matrix(self, info: RoundInfo) -> Matrix:
        raise TypeError("NetworkProx's matrix depends on the models")

    def mix(self, states: Sequence[State], info: RoundInfo) -> tuple[list[dict[str, Tensor]], Matrix | None]:
        keys = [key for key, tensor in states[0].items() if tensor.is_floating_point()]
        if self.s < 1:
            self._step(states, info, keys)
        edges = self.network(info.roster)
        edges = edges[[info.present[i] and info.present[j] for i, j in edges]] if len(edges) else edges
        matrix = np.eye(len(states)) if self.solver == "exact" and self.p == 2 else None
        # Each on its own: one hospital's models, however far off, neither touch nor blur what it has no part in.
        for inside, between in graphs.components(len(states), edges):
            part = [states[index] for index in inside]
            if matrix is None:
                self._mix_stack(part, keys, between)
            else:
                solution = solve_gram(gram(part), between, self.tau, self.rho, iterations=self.iterations)
                mix(solution.matrix, part, in_place=True)
                matrix[np.ix_(inside, inside)] = solution.matrix
        return [dict(state) for state in states], matrix

    def _step(self, states: Sequence[State], info: RoundInfo, keys: Sequence[str]) -> None:
        """V in the place of what the hospitals sent; those that sent nothing keep what they have."""
        for last, state, present in zip(info.known, states, info.present, strict=True):
            for key in keys if present else ():
                for before, sent in pieces(last[key], state[key]):
                    sent.copy_(torch.lerp(before, sent, self.s))

    def _mix_stack(self, states: Sequence[State], keys: Sequence[str], edges: Edges) -> None:
        stack = torch.stack([torch.cat([state[key].reshape(-1).double() for key in keys]) for state in states])
        tolerance = {"tolerance": 0.0} if self.solver == "paper" else {}
        mixed = solve_stack(stack, edges, self.tau, float(self.p), self.rho, iterations=self.iterations, **tolerance)
        for row, state in zip(mixed, states, strict=True):
            pieces = row.split([state[key].numel() for key in keys])
            for key, piece in zip(keys, pieces, strict=True):
                state[key].copy_(piece.view(state[key].shape))

    def state(self) -> dict[str, Tensor]:
        return dict(self._known)

    def load_state(self, state: State) -> None:
        self._known.clear()
        self._known.update({key: tensor.clone() for key, tensor in state.items()})
