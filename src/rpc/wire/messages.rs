//! Macros that generate commands and messages from tables, for ggml's protocol and for the extensions.

/// Generates the enum of the commands. Each row has the number, the name, and the allowed lengths of the bodies.
macro_rules! commands {
    (
        $(#[$enum_doc:meta])* $Command:ident($Sizes:ty);
        $($(#[$doc:meta])* $name:ident = $number:literal, $text:literal, $sizes:expr;)*
    ) => {
        $(#[$enum_doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u8)]
        #[non_exhaustive]
        pub enum $Command {
            $($(#[$doc])* $name = $number,)*
        }

        impl $Command {
            /// All commands in the order of their numbers.
            pub const ALL: &'static [$Command] = &[$($Command::$name),*];

            /// The command with this number.
            ///
            /// # Errors
            /// [`WireError::UnknownCommand`] if no command has this number.
            pub const fn from_wire(number: u8) -> Result<$Command, WireError> {
                match number {
                    $($number => Ok($Command::$name),)*
                    _ => Err(WireError::UnknownCommand(number)),
                }
            }

            /// Name of the command in the protocol, for example `ALLOC_BUFFER`.
            pub const fn name(self) -> &'static str {
                match self { $($Command::$name => $text,)* }
            }

            const fn sizes(self) -> $Sizes {
                match self { $($Command::$name => $sizes,)* }
            }
        }

        impl std::fmt::Display for $Command {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.name())
            }
        }
    };
}

/// Generates structs of fields, which are fields themselves.
macro_rules! messages {
    (
        derive $derives:tt
        $($(#[$doc:meta])* $name:ident $(<$life:lifetime>)? { $($(#[$field_doc:meta])* $field:ident: $ty:ty,)* })*
    ) => {
        $(messages! { @struct $derives $(#[$doc])* $name $(<$life>)? { $($(#[$field_doc])* $field: $ty,)* } })*
    };
    (
        @struct ($($derive:ident),*)
        $(#[$doc:meta])* $name:ident $(<$life:lifetime>)? { $($(#[$field_doc:meta])* $field:ident: $ty:ty,)* }
    ) => {
        $(#[$doc])*
        #[derive($($derive),*)]
        pub struct $name $(<$life>)? {
            $($(#[$field_doc])* pub $field: $ty,)*
        }

        impl<'a> Field<'a> for $name $(<$life>)? {
            fn read(_r: &mut Reader<'a>, _: &'static str) -> Result<Self, WireError> {
                Ok($name { $($field: Field::read(_r, stringify!($field))?,)* })
            }

            fn write(&self, _out: &mut Vec<u8>) {
                $(self.$field.write(_out);)*
            }
        }
    };
}

/// Generates the enum of the requests, one variant per struct, each with its command. `streamed` gives the length of the data
/// that the sender appends to an encoded request.
macro_rules! requests {
    (
        $(#[$enum_doc:meta])* $Request:ident: $Command:ident, streamed $streamed:expr;
        $($name:ident $(<$life:lifetime>)? = $command:ident)*
    ) => {
        $(#[$enum_doc])*
        #[allow(missing_docs)] // each variant is the struct of its name
        #[non_exhaustive]
        pub enum $Request<'a> {
            $($name($name $(<$life>)?),)*
        }

        impl<'a> $Request<'a> {
            /// Decodes the body of a request, or the head of a body whose data are streamed. The caller has checked the length of
            /// the body with its command; this function does not check [`Limits::max_body`].
            ///
            /// # Errors
            /// [`WireError`], which names the first field that is missing, invalid or over `limits`.
            pub fn decode(command: $Command, body: &'a [u8], limits: &Limits) -> Result<$Request<'a>, WireError> {
                let mut r = Reader::with_limits(body, *limits);
                let request = match command {
                    $($Command::$command => $Request::$name(Field::read(&mut r, command.name())?),)*
                };
                r.finish(command.name())?;
                Ok(request)
            }

            /// The command of the request.
            pub const fn command(&self) -> $Command {
                match self { $($Request::$name(_) => $Command::$command,)* }
            }

            /// Appends the frame: header and body; of a request whose data are streamed, everything before them.
            pub fn encode(&self, out: &mut Vec<u8>) {
                let streamed: fn(&Self) -> u64 = $streamed;
                write_frame(self.command() as u8, streamed(self), out, |out| match self {
                    $($Request::$name(body) => body.write(out),)*
                });
            }
        }
    };
}

/// Generates the enum of the responses, one variant for each command that has one.
macro_rules! responses {
    (
        $(#[$enum_doc:meta])* $Response:ident: $Command:ident;
        $($(#[$doc:meta])* $name:ident($($field:ident: $ty:ty),*);)*
    ) => {
        $(#[$enum_doc])*
        #[derive(Clone, Debug, PartialEq)]
        #[non_exhaustive]
        pub enum $Response<'a> {
            $($(#[$doc])* $name($($ty),*),)*
        }

        impl<'a> $Response<'a> {
            /// Decodes the body of the response to `command`.
            ///
            /// # Errors
            /// [`WireError`], which names the first field that is missing or invalid; [`WireError::NoResponse`] if `command` has
            /// no response.
            pub fn decode(command: $Command, body: &'a [u8]) -> Result<$Response<'a>, WireError> {
                let mut r = Reader::new(body);
                let response = match command {
                    $($Command::$name => $Response::$name($(Field::read(&mut r, stringify!($field))?),*),)*
                    silent => return Err(WireError::NoResponse(silent.name())),
                };
                r.finish(command.name())?;
                Ok(response)
            }

            /// The command of the request.
            pub const fn command(&self) -> $Command {
                match self { $($Response::$name(..) => $Command::$name,)* }
            }

            /// Appends the body without a header.
            pub fn encode_body(&self, out: &mut Vec<u8>) {
                match self { $($Response::$name($($field),*) => { $($field.write(out);)* })* }
            }
        }
    };
}

pub(super) use {commands, messages, requests, responses};
