"""Which module of a model each declaration of a tensor-parallel plan means, and whether `tp` ranks can do it."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from trimaran.errors import LayoutError
from trimaran.tensor_plan import Colwise, Declaration, Replicated, Rowwise, Sequence, Vocab, matches, read_declaration


def match_plan(model: nn.Module, plan: Mapping[str, object] | None, tp: int) -> dict[str, Declaration]:
    """Name of a module -> what it was declared, in the model's order.

    A glob means whole names of modules; one that fits none means their ends, as in Hugging Face's plans, which name
    the parts of the model under the head. A layer whose weight is tied to a declared one is cut like it.
    Raises LayoutError or JobError for what cannot be cut so.
    """
    if not plan:
        raise LayoutError(
            f"tp={tp}, and the job has no tp_plan.",
            "Tensor parallelism cuts the layers that the job names.",
            'Write, for example, tp_plan={"blocks.*.mlp.up": "colwise", "blocks.*.mlp.down": "rowwise"}; or use tp=1.',
        )
    modules = {name: module for name, module in model.named_modules() if name}
    declared: dict[str, Declaration] = {}
    for pattern, value in plan.items():
        declaration = read_declaration(pattern, value)
        names = [name for name in modules if matches(name, pattern)]
        names = names or [name for name in modules if matches(name, pattern, at_the_end=True)]
        if not names:
            raise LayoutError(
                f"tp_plan[{pattern!r}] names no module of {type(model).__name__}.",
                "Globs are over the names of model.named_modules(); a * stands for one part.",
                f"Correct it, or leave it out; the model's parts are: {', '.join(dict(model.named_children()))}.",
            )
        for name in names:
            if declared.setdefault(name, declaration) != declaration:
                raise LayoutError(
                    f"tp_plan declares {name} twice: as {declared[name]} and, by {pattern!r}, as {declaration}.",
                    "A layer is cut in one way.",
                    "Drop one of the two.",
                )
    _extend_to_tied(modules, declared)
    for name, declaration in declared.items():
        _check_module(name, modules[name], declaration, tp)
    _check_pairs(declared)
    _check_heads_of_config(model, declared, tp)
    return {name: declared[name] for name in modules if name in declared}


def part_sizes(linear: nn.Linear, declaration: Colwise) -> tuple[int, ...]:
    """Rows of each of the projections that a layer fuses."""
    if declaration.parts == 3 and declaration.heads and declaration.kv_heads:
        head_dim = linear.out_features // (declaration.heads + 2 * declaration.kv_heads)
        return (declaration.heads * head_dim, *[declaration.kv_heads * head_dim] * 2)
    return (linear.out_features // declaration.parts,) * declaration.parts


def _extend_to_tied(modules: Mapping[str, nn.Module], declared: dict[str, Declaration]) -> None:
    cut = {
        modules[name].weight: name
        for name, declaration in declared.items()
        if isinstance(declaration, Vocab) and isinstance(modules[name], nn.Linear | nn.Embedding)
    }
    for name, module in modules.items():
        if name not in declared and isinstance(module, nn.Linear | nn.Embedding) and module.weight in cut:
            declared[name] = Vocab()


def _check_module(name: str, module: nn.Module, declaration: Declaration, tp: int) -> None:
    if isinstance(declaration, Sequence | Replicated):
        return
    kinds: tuple[type[nn.Module], ...] = (nn.Linear,)
    if isinstance(declaration, Vocab):
        kinds = (nn.Linear, nn.Embedding)
    if not any(isinstance(module, kind) and type(module).forward is kind.forward for kind in kinds):
        word = type(declaration).__name__.lower()
        raise LayoutError(
            f"tp_plan declares {name} as {word}, and it is {type(module).__name__}.",
            f"What is {word} is one of: {', '.join(f'nn.{kind.__name__}' for kind in kinds)}.",
            "Name such a layer, or leave it out: it is then replicated.",
        )
    if isinstance(declaration, Colwise):
        assert isinstance(module, nn.Linear)
        _check_colwise(name, module, declaration, tp)
    elif isinstance(declaration, Rowwise):
        assert isinstance(module, nn.Linear)
        _check_divides(tp, module.in_features, f"the {module.in_features} inputs of {name}")
    else:
        assert isinstance(module, nn.Linear | nn.Embedding)
        _check_vocabulary(name, module, tp)


def _check_colwise(name: str, linear: nn.Linear, declaration: Colwise, tp: int) -> None:
    heads, kv_heads = declaration.heads, declaration.kv_heads
    if heads is not None:
        _check_divides(tp, heads, f"the {heads} heads of {name}", "Each tensor rank holds whole heads.")
    if kv_heads is not None:
        _check_divides(tp, kv_heads, f"the {kv_heads} key-value heads of {name}", "Each tensor rank holds whole heads.")
    sizes = part_sizes(linear, declaration)
    if sum(sizes) != linear.out_features:
        of_heads = f" with {heads} and {kv_heads} heads" if kv_heads else ""
        raise LayoutError(
            f"{name} has {linear.out_features} outputs, which are not {declaration.parts} parts{of_heads}.",
            "A fused projection is its parts one behind the other.",
            "Correct parts=, heads= and kv_heads= in the tp_plan.",
        )
    for size in sizes:
        _check_divides(tp, size, f"the {size} outputs of {name}")


def _check_vocabulary(name: str, module: nn.Linear | nn.Embedding, tp: int) -> None:
    size = module.weight.shape[0]
    if -(-size // tp) * (tp - 1) >= size:
        raise LayoutError(
            f"tp={tp} leaves a rank without one of the {size} entries of {name}.",
            "Each tensor rank holds a slice of the vocabulary.",
            "Use a smaller tp, or leave the layer out of the tp_plan.",
        )
    if isinstance(module, nn.Embedding) and (module.max_norm is not None or module.scale_grad_by_freq or module.sparse):
        raise LayoutError(
            f"{name} is an embedding with max_norm, scale_grad_by_freq or sparse.",
            "Cut along the vocabulary, an embedding looks up rows and no more.",
            "Build it without, or leave it out of the tp_plan.",
        )


def _check_divides(tp: int, count: int, what: str, rule: str = "Each tensor rank holds an equal share.") -> None:
    if count % tp:
        fitting = ", ".join(str(each) for each in range(1, count + 1) if count % each == 0)
        raise LayoutError(f"tp={tp} does not divide {what}.", rule, f"Use tp in {{{fitting}}}.")


def _check_pairs(declared: Mapping[str, Declaration]) -> None:
    """What is dealt by a colwise layer is taken in by a rowwise one of the same block, and the other way round."""
    columns = {_block(name): name for name, each in declared.items() if isinstance(each, Colwise) and not each.gathers}
    rows = {_block(name): name for name, each in declared.items() if isinstance(each, Rowwise)}
    for these, those, mine, other in ((columns, rows, "colwise", "rowwise"), (rows, columns, "rowwise", "colwise")):
        for block, name in these.items():
            if block not in those:
                where = f"no layer of {block}" if block else "no layer"
                raise LayoutError(
                    f"tp_plan declares {name} as {mine}, and {where} as {other}.",
                    "What a colwise layer deals to the ranks, a rowwise one after it takes in.",
                    f"Declare the {other} layer too, or leave {name} out.",
                )


def _block(name: str) -> str:
    """The name up to its last number: the entry of a list in which a layer lies."""
    parts = name.split(".")
    last = max((index for index, part in enumerate(parts) if part.isdigit()), default=-1)
    return ".".join(parts[: last + 1])


def _check_heads_of_config(model: nn.Module, declared: Mapping[str, Declaration], tp: int) -> None:
    """A Hugging Face plan does not tell heads; their models' config does."""
    config = getattr(model, "config", None)
    for name, declaration in declared.items():
        if not isinstance(declaration, Colwise) or declaration.heads is not None or "attn" not in name:
            continue
        for field, what in (("num_attention_heads", "heads"), ("num_key_value_heads", "key-value heads")):
            count = getattr(config, field, None)
            if isinstance(count, int):
                _check_divides(tp, count, f"the {count} {what} of {name}", "Each tensor rank holds whole heads.")
