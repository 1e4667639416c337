//! That a plan does what its task says, in whatever order its lanes run.
