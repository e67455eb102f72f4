"""How far back each layer of a model attends, from its config.json.

    sliding_window                        tokens that a windowed layer sees, the newest included
    use_sliding_window                    in families where the window is on request
    layer_types                           which layers have it, by name (Mistral's with it are Ministral's); else by the
                                          family's rule:
    max_window_layers                     ... the layers behind the first so many (Qwen)
    sliding_window_pattern                ... all but every n-th (Gemma 3)

The planner counts the KV cache by it and the runtime computes with it, so it imports nothing but the standard library
and the table of families, which has each family's rule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from millstream_runtime.model_families import WindowTraits

SLIDING, FULL = "sliding_attention", "full_attention"  # the words of `layer_types`
LARGEST_WINDOW_TOKENS = 1 << 31

Windows = tuple[int | None, ...]
"""By layer: how many tokens a token of it sees, itself included; None is all. () where no layer has a window."""


class WindowError(ValueError):
    """A field that cannot be used. `what`: its value and what it must be."""

    def __init__(self, field: str, what: str) -> None:
        super().__init__(f"{field} is {what}")
        self.field, self.what = field, what


def layer_windows(config: Mapping[str, object], num_layers: int, traits: WindowTraits | None) -> Windows:
    """Return the window of each layer.

    Args:
        config: the language model's fields, of which none was checked.
        traits: of the family; None: it has no windows.

    Raises:
        WindowError: a field that decides about windows has a value that is impossible.
    """
    if traits is None or (traits.on_request and not _flag(config, "use_sliding_window")):
        return ()
    window = _window(config, traits.default_tokens)
    if window is None:
        return ()
    if traits.in_every_layer and not (traits.types_are_read and _has_layer_types(config)):
        return (window,) * num_layers
    types = config.get("layer_types") or _default_types(config, num_layers, traits)
    if not isinstance(types, Sequence) or len(types) != num_layers or any(one not in (SLIDING, FULL) for one in types):
        raise WindowError(
            "layer_types", f"{types!r:.80}; it must name {SLIDING} or {FULL} for each of {num_layers} layers"
        )
    windows = tuple(window if one == SLIDING else None for one in types)
    return windows if any(windows) else ()


def _has_layer_types(config: Mapping[str, object]) -> bool:
    """By the rule of transformers' AutoConfig: a `mistral` with `layer_types` is a `ministral`. The language model of a
    model with a vision tower is made without that rule, and is one only by its name."""
    is_ministral = "text_config" not in config or config.get("model_type") == "ministral"
    return config.get("layer_types") is not None and is_ministral


def _default_types(config: Mapping[str, object], num_layers: int, traits: WindowTraits) -> list[str]:
    """By the family's rule, where the file has no `layer_types`."""
    if traits.first_full_layers is not None:
        full_layers = config.get("max_window_layers", traits.first_full_layers)
        if not isinstance(full_layers, int) or full_layers < 0:
            raise WindowError("max_window_layers", f"{full_layers!r}; it must be an integer of at least 0")
        return [FULL if layer < full_layers else SLIDING for layer in range(num_layers)]
    full_every = traits.full_every or 1
    if traits.pattern_is_read and config.get("sliding_window_pattern") is not None:
        full_every = _positive(config, "sliding_window_pattern")
    return [FULL if (layer + 1) % full_every == 0 else SLIDING for layer in range(num_layers)]


def _window(config: Mapping[str, object], default_tokens: int | None) -> int | None:
    """None where the file says `null`; the default where it says nothing."""
    if config.get("sliding_window") is not None:
        return _positive(config, "sliding_window")
    return None if "sliding_window" in config else default_tokens


def _positive(config: Mapping[str, object], field: str) -> int:
    value = config[field]
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= LARGEST_WINDOW_TOKENS:
        is_larger = isinstance(value, int) and value > LARGEST_WINDOW_TOKENS
        limit = f" of at most {LARGEST_WINDOW_TOKENS}" if is_larger else ""
        raise WindowError(field, f"{value!r:.80}; it must be a positive integer{limit}")
    return value


def _flag(config: Mapping[str, object], field: str) -> bool:
    value = config.get(field)
    if not isinstance(value, bool | None):
        raise WindowError(field, f"{value!r:.80}; it must be true or false")
    return bool(value)
