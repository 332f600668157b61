"""Whether a state_dict is one that an optimizer can go on from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor


def check_state(state_dict: Mapping[str, Any], own: Mapping[str, Any], parameters: Sequence[Tensor]) -> None:
    """Refuse the state of another optimizer, loss or model.

    Arguments:
        state_dict: what is to be loaded.
        own: options of the optimizer.
        parameters: of the optimizer, in order.
    """
    if not isinstance(state_dict, Mapping) or not {"param_groups", "state"} <= state_dict.keys():
        raise ValueError(
            "the state_dict is no state of an optimizer: it has no 'param_groups' and 'state'. Fix: the one that "
            "HessianFree.state_dict() gave."
        )
    for group in state_dict["param_groups"]:
        missing = sorted(own.keys() - group.keys() - {"param_names"})
        if missing:
            raise ValueError(
                f"the state_dict is of another optimizer: it has no {missing[0]!r}. Fix: the one that "
                "HessianFree.state_dict() gave."
            )
        for name in ("loss", "case_dim"):
            if group[name] != own[name]:
                raise ValueError(
                    f"the state_dict is of {name}={group[name]!r}, the optimizer has {own[name]!r}. "
                    f"Fix: HessianFree(..., {name}={group[name]!r}) if that is meant."
                )
        if not 0 <= group["damping"] < math.inf:
            raise ValueError(f"the damping of the state_dict is {group['damping']}. Fix: a state from before.")
    places = [place for group in state_dict["param_groups"] for place in group["params"]]
    for place, parameter in zip(places, parameters, strict=False):  # torch's own errors name unequal numbers
        direction = state_dict["state"].get(place, {}).get("direction")
        if direction is not None and direction.shape != parameter.shape:
            raise ValueError(
                f"the state_dict has a direction of shape {tuple(direction.shape)} for a parameter of shape "
                f"{tuple(parameter.shape)}. Fix: the state of an optimizer of the same model."
            )
