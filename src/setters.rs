//! Setters for structs of options.

/// Chained setters, `options.with_FIELD(value)`, for a `#[non_exhaustive]` struct of options: other crates can neither write
/// such a struct as a literal nor update one with `..`, so a new field breaks none of them.
macro_rules! setters {
    ($name:ident { $($(#[$attribute:meta])* $with:ident $field:ident: $ty:ty,)* }) => {
        impl $name {
            $(
                #[doc = concat!("The same with another value of `", stringify!($field), "`.")]
                #[must_use]
                $(#[$attribute])*
                pub fn $with(mut self, $field: $ty) -> $name {
                    self.$field = $field;
                    self
                }
            )*
        }
    };
}
pub(crate) use setters;
