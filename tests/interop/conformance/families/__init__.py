"""The cases, one module per group of ops. Importing this package fills the table."""

from . import attention, chains, convolution, copies, elementwise, products, recurrent, rows, shapes, training  # noqa: F401
