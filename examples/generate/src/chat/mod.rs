//! Chat: a conversation as the text that a model was trained to continue, by the model's own template.
//!
//! A chat template is a Jinja template in the model file, so it is outside input: its size, its work and its memory are limited.
//! The variables, functions, filters and whitespace rules are those of transformers' `apply_chat_template`, for which templates
//! are written; llama.cpp has the same. Where Python refuses an operation (a loop over None), minijinja may continue.

mod conversation;
mod json;
#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic, reason = "a failed unwrap fails the test")]
mod tests;

use crate::text_file::read_text_file;
use crate::tokenizer::SpecialTokens;
use jiff::Zoned;
use jiff::fmt::strtime;
use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, Error, ErrorKind, Value, context};
use minijinja_contrib::pycompat::unknown_method_callback;
use std::error::Error as _;
use std::fmt;
use std::io;
use std::path::Path;
use std::thread::Builder;
use thiserror::Error;

pub use conversation::{Conversation, ConversationError, Prompt};

/// Metadata key of the model's template.
pub const TEMPLATE_KEY: &str = "tokenizer.chat_template";

/// Name of the template in the messages of its errors.
const NAME: &str = "template";

/// Largest template in bytes. The largest of the templates of llama.cpp's repository has 17 KB.
const MAX_TEMPLATE_BYTES: usize = 1 << 20;

/// Fuel of one rendering: an instruction costs about 1, and so do 64 bytes that the template creates.
const FUEL: u64 = 2_000_000;

/// Stack of the thread that renders. A template can nest a list in itself for as long as it has fuel, and lists are printed,
/// compared and freed recursively. A quarter of it was enough for 200,000 levels in a development build. Only the pages that are
/// used become memory.
const STACK_BYTES: usize = 512 << 20;

/// A chat template cannot be used, or cannot render a conversation.
#[derive(Debug, Error)]
pub enum TemplateError {
    /// The template is too long.
    #[error("the chat template has {0} bytes, and may have {MAX_TEMPLATE_BYTES}")]
    TooLarge(usize),
    /// The template is not valid Jinja.
    #[error("the chat template is invalid: {0}")]
    Invalid(Error),
    /// The template called `raise_exception`, for example because it has no place for a system prompt.
    #[error("the chat template refuses the conversation: {0}")]
    Refused(String),
    /// The template uses more work or memory than allowed.
    #[error("the chat template is too expensive: it used up its limit of {FUEL} steps")]
    TooExpensive,
    /// The thread that renders cannot be started.
    #[error("the chat template cannot be rendered: no thread for it: {0}")]
    Thread(#[from] io::Error),
    /// The thread that renders panicked.
    #[error("the chat template made its renderer panic (a bug)")]
    Panicked,
    /// The template failed.
    #[error("the chat template failed: {0}")]
    Failed(Error),
}

/// The message of `raise_exception`.
#[derive(Debug, Error)]
#[error("{0}")]
struct RaisedException(String);

impl TemplateError {
    fn rendering(error: Error) -> TemplateError {
        if error.kind() == ErrorKind::OutOfFuel {
            return TemplateError::TooExpensive;
        }
        match error.source().and_then(|source| source.downcast_ref()) {
            Some(RaisedException(reason)) => TemplateError::Refused(reason.clone()),
            None => TemplateError::Failed(error),
        }
    }
}

/// The author of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The instructions at the start.
    System,
    /// The user of the program.
    User,
    /// The model.
    Assistant,
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Role::System => "system",
            Role::User => "user",
            Role::Assistant => "assistant",
        })
    }
}

/// A message of a conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// Its writer.
    pub role: Role,
    /// Its text.
    pub content: String,
}

/// A compiled chat template.
pub struct ChatTemplate {
    environment: Environment<'static>,
    /// The day and month first, and the month first: variables of llama.cpp.
    date_string: String,
    datetime: String,
    thinking: bool,
}

/// Reads a template from a file, which may also be a pipe.
///
/// # Errors
/// As [`read_text_file`].
pub fn read_template(path: &Path) -> io::Result<String> {
    read_text_file(path, MAX_TEMPLATE_BYTES, "a file with a chat template (Jinja)")
}

impl ChatTemplate {
    /// Compiles a template. Dates are those of `now` in every rendering: a text that changed with the clock would differ from the text in
    /// the KV cache.
    ///
    /// # Errors
    /// [`TemplateError::TooLarge`], [`TemplateError::Invalid`].
    pub fn new(source: &str, tokens: &SpecialTokens, now: Zoned) -> Result<ChatTemplate, TemplateError> {
        if source.len() > MAX_TEMPLATE_BYTES {
            return Err(TemplateError::TooLarge(source.len()));
        }
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        let mut environment = Environment::new();
        environment.set_syntax(syntax.map_err(TemplateError::Invalid)?);
        environment.set_fuel(Some(FUEL));
        environment.set_unknown_method_callback(unknown_method_callback);
        environment.add_filter("tojson", json::tojson);
        environment.add_test("iterable", |value: &Value| !value.is_none() && minijinja::tests::is_iterable(value));
        environment.add_function("raise_exception", raise_exception);
        let [date_string, datetime] = ["%d %b %Y", "%b %d %Y"].map(|format| now.strftime(format).to_string());
        environment.add_function("strftime_now", move |format: &str| {
            strtime::format(format, &now).map_err(|e| Error::new(ErrorKind::InvalidOperation, e.to_string()))
        });
        for (name, token) in [("bos_token", &tokens.bos), ("eos_token", &tokens.eos)] {
            environment.add_global(name, Value::from(token.as_str()));
        }
        // transformers passes None for what a conversation does not have.
        for name in ["tools", "documents"] {
            environment.add_global(name, Value::from(()));
        }
        environment.add_template_owned(NAME, without_generation_tags(source)).map_err(TemplateError::Invalid)?;
        Ok(ChatTemplate { environment, date_string, datetime, thinking: true })
    }

    /// Whether a model that can do both thinks before it replies.
    pub fn with_thinking(self, thinking: bool) -> ChatTemplate {
        ChatTemplate { thinking, ..self }
    }

    /// The conversation as text, up to where the model continues with its reply.
    ///
    /// # Errors
    /// [`TemplateError`].
    pub fn render(&self, messages: &[Message]) -> Result<String, TemplateError> {
        let variables =
            |message: &Message| context! { role => message.role.to_string(), content => message.content.as_str() };
        let messages: Vec<Value> = messages.iter().map(variables).collect();
        let ChatTemplate { date_string, datetime, thinking, .. } = self;
        self.render_variables(
            context! { messages, add_generation_prompt => true, enable_thinking => thinking, date_string, datetime },
        )
    }

    /// The template with these variables.
    ///
    /// # Errors
    /// [`TemplateError`].
    pub fn render_variables(&self, variables: Value) -> Result<String, TemplateError> {
        let render = || {
            let template = self.environment.get_template(NAME).map_err(TemplateError::Failed)?;
            template.render(variables).map_err(TemplateError::rendering)
        };
        std::thread::scope(|scope| {
            let thread = Builder::new().name("template".to_owned()).stack_size(STACK_BYTES).spawn_scoped(scope, render);
            thread?.join().unwrap_or(Err(TemplateError::Panicked))
        })
    }
}

/// `raise_exception(text)`: ends the rendering with the template's own message.
fn raise_exception(reason: String) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, reason.clone()).with_source(RaisedException(reason)))
}

/// Replaces the tags of transformers that mark what the model has generated, which only training uses, by an `if` that is always
/// taken: whitespace around the tags is then removed by the usual rules.
fn without_generation_tags(source: &str) -> String {
    let mut text = String::with_capacity(source.len());
    let mut rest = source;
    while let Some((before, after)) = rest.split_once("{%") {
        text.push_str(before);
        text.push_str("{%");
        let tag = after.trim_start_matches(['-', '+']);
        text.push_str(&after[..after.len() - tag.len()]);
        let word = tag.trim_start();
        let replaced = [("generation", "if true"), ("endgeneration", "endif")].into_iter().find_map(|(name, tag)| {
            let end = word.strip_prefix(name)?;
            end.trim_start().trim_start_matches(['-', '+']).starts_with("%}").then_some((tag, end))
        });
        rest = match replaced {
            Some((tag, end)) => {
                text.push(' ');
                text.push_str(tag);
                end
            }
            None => tag,
        };
    }
    text + rest
}
