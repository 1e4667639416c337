//! `kernels/basics`: one feature of the language per kernel. Each file tests the kernels of the .cu file of its name.

mod atomics;
mod barriers;
mod calls;
mod control;
mod copy;
mod elementwise;
mod spaces;
mod transpose;
mod warp;
