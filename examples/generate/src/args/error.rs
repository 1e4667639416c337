//! Arguments that do not match the devices or the model.

use thiserror::Error;

/// An argument does not match the devices or the model.
#[derive(Clone, Debug, Error, PartialEq)]
pub enum ArgsError {
    /// The number of shares differs from the number of devices.
    #[error("--split has {shares} shares for {devices} devices: give one for each")]
    Shares {
        /// Number of shares given.
        shares: usize,
        /// Number of devices.
        devices: usize,
    },
    /// A group with a share of 0, or too many devices.
    #[error("--split tensor: {0}")]
    Group(String),
    /// All shares are 0.
    #[error("--split gives every device a share of 0: at least one must be above 0")]
    NoShare,
    /// `--mem` with devices of servers only.
    #[error(
        "--mem limits devices of this machine, but all devices belong to servers: give --mem to rpc-server instead"
    )]
    Memory,
    /// The prompt is empty.
    #[error(
        "the prompt has no tokens, and this model adds no begin-of-text token: give a non-empty --prompt, or --tokens"
    )]
    NoPrompt,
    /// A token id outside the vocabulary.
    #[error("--tokens: the model has no token {token}: its ids are below {vocab}")]
    Token {
        /// The id.
        token: u32,
        /// Size of the vocabulary.
        vocab: usize,
    },
    /// `--ctx` is smaller than the prompt plus `--predict`.
    #[error(
        "--ctx {ctx} is less than {prompt} tokens of the prompt and {predict} of --predict: {needed} are needed; give a larger \
         --ctx, or a smaller --predict"
    )]
    Context {
        /// Value of `--ctx`.
        ctx: usize,
        /// Tokens of the prompt.
        prompt: usize,
        /// Tokens to generate.
        predict: usize,
        /// Sum of both.
        needed: usize,
    },
    /// More positions than a KV cache can have.
    #[error(
        "{sequences} sequences with a context of {context} tokens have more than {most} positions: give a smaller --ctx, \
         --predict or --parallel"
    )]
    LargeContext {
        /// Tokens of each sequence.
        context: usize,
        /// Sequences at a time.
        sequences: usize,
        /// Positions of a KV cache.
        most: usize,
    },
    /// The conversation leaves no room for a reply.
    #[error(
        "the conversation has {prompt} tokens, and the context of {ctx} has no room for a reply: give a larger --ctx"
    )]
    ContextFull {
        /// Capacity of the KV cache.
        ctx: usize,
        /// Tokens of the conversation.
        prompt: usize,
    },
    /// Prompts of a file without replies.
    #[error("--predict 0 with --prompts: give at least 1, because only replies are printed")]
    NoReplies,
    /// A file without prompts.
    #[error("--prompts: the file has no prompt: give one per line")]
    NoPrompts,
    /// A report in JSON of more than one reply.
    #[error("--json prints one report: with --chat, it needs a --prompt")]
    JsonChat,
}
