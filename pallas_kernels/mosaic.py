"""Kernels on Pallas's Mosaic GPU backend, written for threads of a program, not for tiles.

Nothing of it is imported before a kernel is traced: JAX 0.10 has another interface, and the backend
takes a second to load.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

# Threads that the backend counts as one of its own.
WARPGROUP = 128
# Waits until a barrier's phase of a parity is over.
_WAIT = """{
.reg .pred over;
WAIT:
mbarrier.try_wait.parity.shared.b64 over, [$0], $1;
@!over bra WAIT;
}"""
_EXPECT = "{ .reg .b64 state; mbarrier.arrive.expect_tx.shared.b64 state, [$0], $1; }"
_COPY = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];"
_GIVE_BACK = """{
.reg .b64 state;
.reg .b32 lane;
.reg .pred first;
bar.warp.sync 0xffffffff;
mov.u32 lane, %laneid;
setp.eq.u32 first, lane, 0;
@first mbarrier.arrive.shared.b64 state, [$0];
}"""


class Inside:
    """What a kernel is written with; numbers are of 32 bits.

    Attributes:
        context: of the launch, which makes copies.
        thread: of this program.
        program: of the grid.
    """

    def __init__(self, context: Any):
        import jax.experimental.mosaic.gpu as mosaic
        from jax.extend.mlir import ir
        from jax.extend.mlir.dialects import arith, scf
        from jaxlib.mlir.dialects import gpu, llvm

        self.context, self._mosaic = context, mosaic
        self._ir, self._arith, self._llvm, self._scf = ir, arith, llvm, scf
        self._word, self._long = (ir.IntegerType.get_signless(bits) for bits in (32, 64))
        self.thread = mosaic.thread_idx()
        self.program = arith.index_cast(self._word, gpu.block_id(gpu.Dimension.x))

    def number(self, value: int) -> Any:
        """A constant."""
        return self._arith.constant(self._word, self._ir.IntegerAttr.get(self._word, value))

    def sum(self, *values: Any) -> Any:
        """Of numbers, some of them constants."""
        total, *others = map(self._value, values)
        for other in others:
            total = self._arith.addi(total, other)
        return total

    def product(self, a: Any, b: Any) -> Any:
        """Of two numbers."""
        return self._arith.muli(self._value(a), self._value(b))

    def divided(self, a: Any, b: Any) -> tuple[Any, Any]:
        """Quotient and remainder of numbers that are not negative."""
        a, b = self._value(a), self._value(b)
        return self._arith.divui(a, b), self._arith.remui(a, b)

    def less(self, a: Any, b: Any) -> Any:
        """Whether one number is less than another, with signs."""
        predicate = self._arith.CmpIPredicate.slt
        return self._arith.cmpi(predicate, self._value(a), self._value(b))

    def both(self, a: Any, b: Any) -> Any:
        """Whether two conditions hold."""
        return self._arith.andi(a, b)

    def either(self, a: Any, b: Any) -> Any:
        """Whether one of two conditions holds."""
        return self._arith.ori(a, b)

    def select(self, condition: Any, a: Any, b: Any) -> Any:
        """One value where it holds, else the other."""
        return self._arith.select(condition, a, b)

    def one_if(self, condition: Any) -> Any:
        """1 or 0."""
        return self._arith.extui(self._word, condition)

    def address(self, ref: Any) -> Any:
        """Where an array in the device's memory begins: 64 bits."""
        return self._llvm.ptrtoint(self._long, self._mosaic.utils.memref_ptr(ref))

    def row_address(self, ref: Any, row: Any, size: int) -> Any:
        """Where a row of so many bytes of it begins, however far that is."""
        wide = self._arith.constant(self._long, self._ir.IntegerAttr.get(self._long, size))
        row = self._arith.extui(self._long, self._value(row))
        return self._arith.addi(self.address(ref), self._arith.muli(row, wide))

    def shared_address(self, ref: Any, *offsets: Any) -> Any:
        """Where memory that the threads share begins, so many bytes further on."""
        pointer = self._mosaic.utils.memref_ptr(ref)
        return self.sum(self._llvm.ptrtoint(self._word, pointer), *offsets)

    def assembly(self, text: str, *operands: Any, results: int = 0) -> list[Any]:
        """PTX whose placeholders are results, so many numbers, and then operands."""
        words = ["l" if operand.type == self._long else "r" for operand in operands]
        constraints = ",".join([*["=r"] * results, *words, "~{memory}"])
        kind = self._ir.Type.parse("!llvm.void") if results == 0 else self._word
        if results > 1:
            kind = self._llvm.StructType.get_literal([self._word] * results)
        found = self._llvm.inline_asm(
            kind, operands, text, constraints, has_side_effects=True, asm_dialect=0
        )
        if results < 2:
            return [found] * results
        return [self._llvm.extractvalue(self._word, found, [i]) for i in range(results)]

    def wait(self, barrier: Any, parity: Any) -> None:
        """Until the phase of a parity of a barrier in shared memory is over."""
        self.assembly(_WAIT, barrier, parity)

    def expect(self, barrier: Any, count: Any) -> None:
        """Arrives at a barrier, whose phase lasts until so many bytes have come; by one thread."""
        self.assembly(_EXPECT, barrier, self._value(count))

    def copy(self, to: Any, source: Any, count: Any, barrier: Any) -> None:
        """Asks the copy engine for so many bytes, which a barrier counts; by one thread."""
        self.assembly(_COPY, to, source, self._value(count), barrier)

    def give_back(self, barrier: Any) -> None:
        """Arrives at a barrier as soon as all threads of the warp are here."""
        self.assembly(_GIVE_BACK, barrier)

    @contextlib.contextmanager
    def when(self, condition: Any) -> Iterator[None]:
        """Only threads for which it holds do what is said inside."""
        with self._mosaic.when(condition):
            yield

    @contextlib.contextmanager
    def over(self, begin: Any, end: Any, step: int = 1) -> Iterator[Any]:
        """A loop; gives its index."""
        bounds = (self._value(value) for value in (begin, end, step))
        loop = self._scf.ForOp(*bounds)
        with self._ir.InsertionPoint(loop.body):
            yield loop.induction_variable
            self._scf.yield_([])

    def repeated(
        self, count: int, values: Sequence[Any], body: Callable[..., Sequence[Any]]
    ) -> list[Any]:
        """What becomes of numbers that a body, given an index from 0 on, makes anew each time."""
        bounds = (self._value(value) for value in (0, count, 1))
        loop = self._scf.ForOp(*bounds, [self._value(value) for value in values])
        with self._ir.InsertionPoint(loop.body):
            self._scf.yield_(body(loop.induction_variable, *loop.inner_iter_args))
        return list(loop.results)

    def copy_rows(
        self, source: Any, rows: tuple[Any, int], columns: tuple[Any, int], to: Any, barrier: Any
    ) -> None:
        """Asks the copy engine for a box of a matrix; by one thread.

        What comes has pieces of 16 bytes in another order in each row, for lines of 32, 64 or 128.

        Args:
            source: matrix of words in the device's memory.
            rows: first one, and how many.
            columns: first one, and how many: a line.
            to: shared memory: an array, and where in it.
            barrier: shared memory that holds barriers, and which of them counts the bytes.
        """
        mosaic = self._mosaic
        (first, count), (column, width) = rows, columns
        array, (stage, box, row) = to
        bars, which = barrier
        index = self._ir.IndexType.get()
        place = self._arith.index_cast(index, stage), box, mosaic.ds(row, count)
        self.context.async_copy(
            src_ref=source,
            dst_ref=mosaic.memref_slice(array, place),
            gmem_slice=(
                mosaic.ds(self._arith.index_cast(index, first), count),
                mosaic.ds(self._arith.index_cast(index, self._value(column)), width),
            ),
            barrier=mosaic.BarrierRef(mosaic.utils.memref_ptr(bars), which, None, 1),
            arrive=False,
            swizzle=4 * width,
            predicate=None,
        )

    def _value(self, value: Any) -> Any:
        return self.number(value) if isinstance(value, int) else value


def launch(
    kernel: Callable[..., None],
    *arrays: Any,
    name: str,
    programs: int,
    threads: int,
    shared: Sequence[jax.ShapeDtypeStruct],
    out: jax.ShapeDtypeStruct | Sequence[jax.ShapeDtypeStruct],
) -> Any:
    """What a kernel writes.

    Args:
        kernel: takes an `Inside`, arrays, results, and shared memory, as references.
        arrays: of the call.
        name: in profiles.
        programs: so many.
        threads: of each; a multiple of `WARPGROUP`.
        shared: memory that a program's threads share.
        out: the result, or several.
    """
    from jax.experimental.pallas import mosaic_gpu as backend

    def body(*refs: Any) -> None:
        of_all = (backend.RefType(),) * len(refs)

        @backend.inline_mgpu(arg_types=of_all, return_type=None)
        def run(context: Any, *refs: Any) -> None:
            kernel(Inside(context), *refs)

        run(*refs)

    # The backend names what it makes so.
    body.__name__ = name
    one = backend.kernel(
        body,
        out_type=out,
        scratch_types=[backend.SMEM(each.shape, each.dtype) for each in shared],
        grid=(programs,),
        grid_names=("program",),
        num_threads=threads // WARPGROUP,
        thread_name="warpgroup",
        compiler_params=backend.CompilerParams(
            lowering_semantics=backend.LoweringSemantics.Lane,
            reduction_scratch_bytes=0,
            unsafe_no_auto_barriers=True,
        ),
    )
    # The backend would batch by another axis of the grid, and hand on slices of arrays: the copy
    # engine takes whole ones only.
    return jax.custom_batching.sequential_vmap(one)(*arrays)


# Bytes from whose multiples each array of shared memory begins.
_ALIGNMENT = 1024


def memory_of(sizes: Sequence[int]) -> int:
    """Bytes of shared memory that arrays of so many bytes take together."""
    return sum(-(-max(16, size) // _ALIGNMENT) * _ALIGNMENT for size in sizes)


def bytes_of(count: int) -> jax.ShapeDtypeStruct:
    """Shared memory of so many bytes."""
    return jax.ShapeDtypeStruct((max(16, count),), jnp.int8)
