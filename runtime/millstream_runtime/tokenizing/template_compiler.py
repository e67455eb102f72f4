"""Jinja's compiler, with a call of the environment wherever it leaves an operation to Python.

{% for x in y %}        environment.check_time() at the head of the body
a + b + c               environment.added
a ~ b, a[1:2], [a, b]   environment.concatenated, .made
a == b, {a: b}          environment.as_key: what is compared and hashed
a in b                  environment.is_in
{{ a }}                 environment.written
{% set %}…{% endset %}  environment.buffer(), as a macro and a call have
"""

from __future__ import annotations

from collections.abc import Callable

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame, operators

from millstream_runtime.tokenizing.template_limits import SHORT_CHARACTERS

FEW_ITEMS = 8  # of a list of constants, which is not worth counting


class TemplateCompiler(CodeGenerator):
    """Jinja's own, with calls of the environment where it leaves an operation to Python."""

    def buffer(self, frame: Frame) -> None:
        frame.buffer = self.temporary_identifier()
        self.writeline(f"{frame.buffer} = environment.buffer()")

    def visit_For(self, node: nodes.For, frame: Frame) -> None:  # noqa: N802
        look_at_the_clock = nodes.ExprStmt(nodes.EnvironmentAttribute("check_time()"))
        node.body = [look_at_the_clock, *node.body]
        super().visit_For(node, frame)

    def visit_Add(self, node: nodes.BinExpr, frame: Frame) -> None:  # noqa: N802
        parts: list[nodes.Expr] = [node.right]
        left = node.left
        while isinstance(left, nodes.Add):
            parts.append(left.right)
            left = left.left
        self.write("environment.added((")
        for part in (left, *reversed(parts)):
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        by_markup = "markup_join if context.eval_ctx.autoescape else str_join"
        self.write(f"environment.concatenated(({by_markup}), (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:  # noqa: N802
        if isinstance(node.arg, nodes.Slice):
            self._visit_within("environment.made(", super().visit_Getitem, node, frame)
        elif isinstance(node.arg, nodes.Const):
            super().visit_Getitem(node, frame)
        else:
            self.write("environment.getitem(")
            self.visit(node.node, frame)
            self._visit_within(", environment.as_key(", self.visit, node.arg, frame)
            self.write(")")

    def visit_List(self, node: nodes.List, frame: Frame) -> None:  # noqa: N802
        opening = "(" if _is_short_list(node) else "environment.made("
        self._visit_within(opening, super().visit_List, node, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:  # noqa: N802
        if node.ctx != "load" or _is_short_list(node):
            super().visit_Tuple(node, frame)
        else:
            self._visit_within("environment.made(", super().visit_Tuple, node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:  # noqa: N802
        self.write("environment.made({")
        for item in node.items:
            self._visit_within("environment.as_key(", self.visit, item.key, frame)
            self.write(": ")
            self.visit(item.value, frame)
            self.write(", ")
        self.write("})")

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:  # noqa: N802
        if len(node.ops) == 1:
            right = node.ops[0].expr
            is_membership = node.ops[0].op in ("in", "notin")
            if _is_short(right) or (_is_short_list(right) if is_membership else _is_short(node.expr)):
                super().visit_Compare(node, frame)
                return
            if is_membership:
                self._visit_membership(node, frame)
                return
        self._visit_within("(environment.as_key(", self.visit, node.expr, frame)
        for operand in node.ops:
            self.write(f" {operators[operand.op]} ")
            is_compared_once = operand is node.ops[-1] and operand.op not in ("in", "notin")
            opening = "(" if is_compared_once else "environment.as_key("
            self._visit_within(opening, self.visit, operand.expr, frame)
        self.write(")")

    def _visit_membership(self, node: nodes.Compare, frame: Frame) -> None:
        self.write("(not environment.is_in(" if node.ops[0].op == "notin" else "(environment.is_in(")
        self.visit(node.expr, frame)
        self._visit_within(", ", self.visit, node.ops[0].expr, frame)
        self.write(")")

    def _visit_within(self, opening: str, visit: Callable[..., None], node: nodes.Node, frame: Frame) -> None:
        self.write(opening)
        visit(node, frame)
        self.write(")")

    def _output_child_pre(self, node: nodes.Expr, frame: Frame, finalize: CodeGenerator._FinalizeInfo) -> None:
        if frame.eval_ctx.volatile or frame.eval_ctx.autoescape:
            super()._output_child_pre(node, frame, finalize)
        else:
            self.write("environment.written(")

    def _output_child_post(self, node: nodes.Expr, frame: Frame, finalize: CodeGenerator._FinalizeInfo) -> None:
        if frame.eval_ctx.volatile or frame.eval_ctx.autoescape:
            super()._output_child_post(node, frame, finalize)
        else:
            self.write(")")


def _is_short(node: nodes.Expr) -> bool:
    """Whether this is a constant with which anything is compared at once."""
    return isinstance(node, nodes.Const) and (not isinstance(node.value, str) or len(node.value) < SHORT_CHARACTERS)


def _is_short_list(node: nodes.Expr) -> bool:
    if not isinstance(node, nodes.List | nodes.Tuple) or len(node.items) > FEW_ITEMS:
        return False
    return all(map(_is_short, node.items))
