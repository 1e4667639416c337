//! A conversation with a model: the messages so far, and the prompt for the next reply.

use super::{ChatTemplate, Message, Role, TemplateError};
use crate::tokenizer::{Tokenizer, TokenizerError};
use thiserror::Error;

/// The next prompt cannot be made.
#[derive(Debug, Error)]
pub enum ConversationError {
    /// The template has failed.
    #[error(transparent)]
    Template(#[from] TemplateError),
    /// The text cannot be encoded.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
}

/// A prompt as tokens, and the text from which they come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prompt {
    /// The text; `None` for tokens from the command line.
    pub text: Option<String>,
    /// The tokens.
    pub tokens: Vec<u32>,
}

/// The messages of a conversation.
pub struct Conversation<'a> {
    template: ChatTemplate,
    tokenizer: &'a Tokenizer,
    messages: Vec<Message>,
}

impl<'a> Conversation<'a> {
    /// A conversation that begins with a system prompt, or with the user's first message.
    ///
    /// # Errors
    /// A template that cannot render a first message.
    pub fn new(
        template: ChatTemplate,
        tokenizer: &'a Tokenizer,
        system: Option<&str>,
    ) -> Result<Conversation<'a>, TemplateError> {
        let system = system.map(|text| Message { role: Role::System, content: text.to_owned() });
        let conversation = Conversation { template, tokenizer, messages: system.into_iter().collect() };
        // Errors appear before the model is loaded.
        let first = Message { role: Role::User, content: "?".to_owned() };
        conversation.template.render(&[conversation.messages.as_slice(), &[first]].concat())?;
        Ok(conversation)
    }

    /// Adds a message of the user; returns the whole conversation as a prompt.
    ///
    /// # Errors
    /// [`ConversationError`].
    pub fn add_question(&mut self, message: &str) -> Result<Prompt, ConversationError> {
        self.messages.push(Message { role: Role::User, content: message.to_owned() });
        let text = self.template.render(&self.messages)?;
        let tokens = self.tokenizer.encode_rendered(&text)?;
        Ok(Prompt { text: Some(text), tokens })
    }

    /// Adds the model's reply.
    pub fn add_reply(&mut self, reply: String) {
        self.messages.push(Message { role: Role::Assistant, content: reply });
    }
}
