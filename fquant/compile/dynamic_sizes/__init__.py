"""Dynamic sizes: pad arguments to a few sizes and cut the results, so that one trace serves many calls.

    length = DynamicSize("length", to=64)                               # 64, 128, 256, ...

    @jit(dynamic={"tokens": Padded(length, dim=1, value=0), "targets": Padded(length, dim=1, value=IGNORE)})
    def step(adapters, base, tokens, targets): ...               # [b t], with another t at each call

A trace has fixed shapes, and Python code may read them. So a dim that varies is padded behind its elements with a
value, up to the next of a few sizes. The function is traced once for each of these. Naming the value asserts that the
result does not depend on the padding: an ignored target, a token that attention cannot see, a mask that is False. The
function sees padded shapes. A mean over the dim is wrong, and a sum over targets that are not ignored is right.

*Results.* A dim of a result that grows with the size, one for one, is cut by what was padded: ``[b t v]``, or
``[b t - 1 v]``. A trace of arguments that are not padded shows which dims do. Others stay as they are.

*Verification.* The first call of a trace that is padded compares its results with those of arguments that are not
padded. These are traced too, because eager gradients need four times the memory, and that trace is dropped. Integers,
booleans and Python values must be equal. Floats are summed in another order: the norm of their difference is at most
``sqrt(eps)`` of their norm, which is 3.5e-4 in float32 and 0.09 in bfloat16. Smaller dependence is not seen, nor is one
on values that the first call lacks. An error leaves donated arguments as they were, because it is given copies of them.

*Ranks.* With ``agree`` every rank of the default group calls the function. All pad to the size that the largest needs,
for one exchange of numbers a call, and errors are raised on every rank. Without it a rank pads for itself. If ranks
then run different collectives, or only some verify, all raise (collective_check.py).

    sizes.py      a size, an argument that has it, and how it is padded
    results.py    the dims of a result that grow with a size, and the comparison with a result without padding
    padding.py    the calls of a captured function
"""

from .padding import Jit, Padding, Prepared
from .sizes import DynamicSize, Padded

__all__ = ["Jit", "Padded", "Padding", "Prepared", "DynamicSize"]
