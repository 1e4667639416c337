//! How text is split into words before merges apply: a table from `tokenizer.ggml.pre` to regexes. Names and regexes are llama.cpp's
//! (`llama-vocab.cpp`), because converters write its names. Where llama.cpp's regex engine has fewer classes of characters than
//! Unicode (all letters are one class), the regexes here have its classes. Characters that normalise to others are written as numbers: an
//! editor that normalises a file would move the bounds of a range.

use super::{TokenizerError, bad_value, key};
use fancy_regex::Regex;
use fanout::gguf::{KeyError, Metadata};

/// The rules of a pre-tokenizer.
pub(super) struct PreTokenizer {
    /// Names in `tokenizer.ggml.pre`.
    names: &'static [&'static str],
    /// Applied one after the other, each to the words of the one before.
    steps: &'static [Step],
    /// Which words become one token if they are in the vocabulary, even if the merges do not produce them.
    pub(super) whole_words: WholeWords,
    /// Whether a begin-of-text token is added if the file lacks `add_bos_token`.
    pub(super) add_bos: bool,
    /// The token for begin and end of text if the file lacks the keys.
    pub(super) default_bos: Option<u32>,
    pub(super) default_eos: Option<u32>,
    /// Whether each byte of a word is mapped to a printable character.
    pub(super) maps_bytes: bool,
    /// Whether spaces become `▁`.
    pub(super) escapes_spaces: bool,
    /// Whether the file may lack merges.
    pub(super) needs_no_merges: bool,
}

/// See [`PreTokenizer::whole_words`].
pub(super) enum WholeWords {
    Never,
    Always,
    LineBreaks,
}

/// How words are cut into shorter words.
enum Step {
    /// Each match becomes a word, and so does the text between matches.
    Match(&'static str),
    /// Cut at these positions of the word.
    Cut(fn(&str) -> Vec<usize>),
}

use Step::{Cut, Match};

const GPT2: Step = Match(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+");
const DIGIT_GROUPS: Step = Cut(ends_of_digit_groups);
const DIGIT: Step = Match(r"\p{N}");
const UP_TO_THREE_DIGITS: Step = Match(r"\p{N}{1,3}");
const LLAMA3: Step = Match(
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
);
const QWEN2: Step = Match(
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
);
const KANA: Step = Match("[一-龥぀-ゟ゠-ヿ]+");
const DEEPSEEK3: Step = Match(
    r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##,
);
const GPT4O: Step = Match(
    r"[^\r\n\p{L}\p{N}]?[\p{L}--[a-z]]*[\p{L}--[A-Z]]+(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])?|[^\r\n\p{L}\p{N}]?[\p{L}--[a-z]]+[\p{L}--[A-Z]]*(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
);
const BLOOM: Step = Match(r" ?[^(\s|.,!?…。，、।۔،)]+");
const LINES: Step = Match(r"[^\n]+|[\n]+");

/// What most pre-tokenizers have in common.
const PLAIN: PreTokenizer = PreTokenizer {
    names: &[],
    steps: &[GPT2],
    whole_words: WholeWords::Never,
    add_bos: false,
    default_bos: Some(11),
    default_eos: Some(11),
    maps_bytes: true,
    escapes_spaces: false,
    needs_no_merges: false,
};

const WHOLE: PreTokenizer = PreTokenizer { whole_words: WholeWords::Always, ..PLAIN };

/// The text itself, with `▁` for spaces, as SentencePiece has it.
const UNMAPPED: PreTokenizer = PreTokenizer { steps: &[LINES], maps_bytes: false, escapes_spaces: true, ..PLAIN };

static TABLE: &[PreTokenizer] = &[
    PreTokenizer {
        names: &["default"],
        steps: &[Match(r"[\p{P}$+<=>\^~|]+"), GPT2, Match(r"\p{N}+"), Match("[0-9][0-9][0-9]")],
        ..PLAIN
    },
    PreTokenizer {
        names: &[
            "llama3",
            "llama-v3",
            "llama-bpe",
            "falcon3",
            "falcon-h1",
            "pixtral",
            "midm-2.0",
            "lfm2",
            "jina-v5-nano",
        ],
        steps: &[LLAMA3],
        add_bos: true,
        ..WHOLE
    },
    PreTokenizer { names: &["dbrx", "smaug-bpe"], steps: &[LLAMA3], ..PLAIN },
    PreTokenizer { names: &["chatglm-bpe"], steps: &[LLAMA3], default_bos: None, ..PLAIN },
    PreTokenizer { names: &["glm4", "glm5"], steps: &[LLAMA3], default_bos: None, ..WHOLE },
    PreTokenizer {
        names: &["jais-2"],
        steps: &[Match(
            r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)|\s{1,2}(?!\S)|\s{1}",
        )],
        ..PLAIN
    },
    PreTokenizer {
        names: &["deepseek-llm"],
        steps: &[
            Match(r"[\r\n]"),
            Match(
                r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\x{1F7D}ᾀ-ᾴᾶ-ᾼ\x{1FBE}ῂ-ῄῆ-ῌῐ-\x{1FD3}ῖ-\x{1FDB}ῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\x{2126}ℨ\x{212A}-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+",
            ),
            Match(r"\s?[!-/:-~！-／：-～‘-‟、-。]+"),
            Match(r"\s+$"),
            Match("[一-龥ࠀ-一가-퟿]+"),
            Match(r"\p{N}+"),
        ],
        ..PLAIN
    },
    PreTokenizer {
        names: &["deepseek-coder"],
        steps: &[Match(r"[\r\n]"), Match(r"\s?\p{L}+"), Match(r"\s?\p{P}+"), Match("[一-龥ࠀ-一가-퟿]+"), DIGIT],
        ..PLAIN
    },
    PreTokenizer {
        names: &["deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"],
        steps: &[UP_TO_THREE_DIGITS, KANA, DEEPSEEK3],
        ..PLAIN
    },
    PreTokenizer {
        names: &["spark2_5"],
        steps: &[
            UP_TO_THREE_DIGITS,
            KANA,
            Match(
                r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+|[\r\n]|\s+(?!\S)|\s+"##,
            ),
            DIGIT,
        ],
        ..PLAIN
    },
    PreTokenizer {
        names: &["youtu"],
        steps: &[
            Match("[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+"),
            Match(
                r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])?|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
            ),
        ],
        ..WHOLE
    },
    PreTokenizer {
        names: &["falcon"],
        steps: &[Match(r"[\p{P}$+<=>\^~|`]+"), GPT2, Match("[0-9][0-9][0-9]")],
        ..PLAIN
    },
    PreTokenizer {
        names: &["starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2"],
        steps: &[DIGIT, GPT2],
        ..PLAIN
    },
    PreTokenizer {
        names: &[
            "gpt-2",
            "phi-2",
            "jina-es",
            "jina-de",
            "gigachat",
            "jina-v2-es",
            "jina-v2-de",
            "a.x-4.0",
            "mellum",
            "modern-bert",
            "jina-v1-en",
            "jina-v2-code",
            "roberta-bpe",
            "mpt",
            "olmo",
            "jais",
            "trillion",
            "granite-docling",
            "exaone4",
        ],
        ..PLAIN
    },
    PreTokenizer {
        names: &[
            "qwen2",
            "deepseek-r1-qwen",
            "kormo",
            "f2llmv2",
            "megrez",
            "stablelm2",
            "hunyuan",
            "solar-open",
            "grok-2",
        ],
        steps: &[QWEN2],
        ..PLAIN
    },
    PreTokenizer {
        names: &["qwen35"],
        steps: &[Match(
            r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        )],
        ..PLAIN
    },
    PreTokenizer { names: &["poro-chat", "bloom", "gpt3-finnish"], steps: &[BLOOM], ..PLAIN },
    PreTokenizer { names: &["viking"], steps: &[BLOOM, DIGIT], ..PLAIN },
    PreTokenizer {
        names: &["tekken"],
        steps: &[Match(
            r"[^\r\n\p{L}\p{N}]?[\p{L}--[a-z]]*[\p{L}--[A-Z]]+|[^\r\n\p{L}\p{N}]?[\p{L}--[a-z]]+[\p{L}--[A-Z]]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        )],
        add_bos: true,
        ..WHOLE
    },
    PreTokenizer {
        names: &["chameleon"],
        steps: &[
            Match("<sentinel:[0-9]+>"),
            Match("IMGIMG[A-I]{1,4}Z"),
            Match(r"[\t\n]|    |  "),
            DIGIT,
            Match(r"[\p{P}!-/:-@\[-`{-~]"),
            GPT2,
        ],
        add_bos: true,
        ..PLAIN
    },
    PreTokenizer { names: &["gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"], steps: &[GPT4O], ..PLAIN },
    PreTokenizer {
        names: &["granite-embed-multi-97m"],
        steps: &[Match(
            r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}--[a-z]]*[\p{L}\p{M}--[A-Z]]+(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])?|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}--[a-z]]+[\p{L}\p{M}--[A-Z]]*(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        )],
        ..WHOLE
    },
    PreTokenizer {
        names: &["tiny_aya", "cohere2moe"],
        steps: &[
            DIGIT_GROUPS,
            Match(
                r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
            ),
        ],
        ..PLAIN
    },
    PreTokenizer {
        names: &["kimi-k2"],
        steps: &[Match(
            r"[㐀-䶿一-鿿\x{F900}-\x{FAFF}\x{20000}-\x{2A6DF}\x{2A700}-\x{2EBEF}\x{2F800}-\x{2FA1F}]+|[^\r\n\p{L}\p{N}]?[\p{L}--[㐀-䶿一-鿿\x{F900}-\x{FAFF}\x{20000}-\x{2A6DF}\x{2A700}-\x{2EBEF}\x{2F800}-\x{2FA1F}]]+(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        )],
        needs_no_merges: true,
        ..PLAIN
    },
    PreTokenizer { names: &["superbpe"], steps: &[Match(r"\p{N}+"), Cut(starts_of_ascii_digit_groups)], ..PLAIN },
    PreTokenizer {
        names: &["bailingmoe", "bailingmoe2", "llada-moe"],
        steps: &[Match(
            r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
        )],
        ..PLAIN
    },
    PreTokenizer {
        names: &["seed-coder"],
        steps: &[Match(
            r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",
        )],
        ..PLAIN
    },
    PreTokenizer {
        names: &["ufakzeka"],
        steps: &[Match(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")],
        ..PLAIN
    },
    PreTokenizer {
        names: &["afmoe"],
        steps: &[
            DIGIT_GROUPS,
            Match(r"[一-鿿㐀-䶿\x{F900}-\x{FAFF}぀-ゟ゠-ヿ･-ﾟ⼀-⿟เ-๿຀-໿ក-៿က-႟ꩠ-ꩿꧠ-꧿가-힯ᄀ-ᇿ]+"),
            DEEPSEEK3,
        ],
        ..PLAIN
    },
    PreTokenizer { names: &["laguna"], steps: &[LINES, QWEN2], ..PLAIN },
    PreTokenizer {
        names: &["exaone-moe"],
        steps: &[Match(
            r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
        )],
        ..PLAIN
    },
    PreTokenizer {
        names: &["gemma4"],
        whole_words: WholeWords::LineBreaks,
        add_bos: true,
        default_bos: None,
        default_eos: None,
        ..UNMAPPED
    },
    PreTokenizer {
        names: &["granite-embed-multi-311m"],
        whole_words: WholeWords::LineBreaks,
        add_bos: true,
        ..UNMAPPED
    },
    PreTokenizer { names: &["sarvam-moe"], ..UNMAPPED },
    PreTokenizer {
        names: &["minicpm5"],
        steps: &[
            UP_TO_THREE_DIGITS,
            Match(
                r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}+| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
            ),
        ],
        ..WHOLE
    },
];

impl PreTokenizer {
    /// The pre-tokenizer of a file. Files without the key are split as llama.cpp splits them, which can differ from the model's
    /// training.
    pub(super) fn read(metadata: &Metadata<'_>) -> Result<&'static PreTokenizer, KeyError> {
        let name = match metadata.text(key::PRE)? {
            // The vocabulary implies the name, which some files have different.
            _ if metadata.text(key::MODEL)? == Some("gemma4") => "gemma4",
            None | Some("") => {
                log::warn!(
                    "the file has no {}, so the model may get other tokens than in its training: convert it again with a new llama.cpp",
                    key::PRE
                );
                "default"
            }
            Some(name) => name,
        };
        TABLE.iter().find(|pre| pre.names.contains(&name)).ok_or_else(|| {
            let names: Vec<_> = TABLE.iter().flat_map(|pre| pre.names).copied().collect();
            let expected = format!("one of {}, the pre-tokenizers this program supports", names.join(", "));
            bad_value(key::PRE, expected, format_args!("{name:?}"))
        })
    }
}

/// Splits text by the rules of a pre-tokenizer.
pub(super) struct Splitter {
    pub(super) pre: &'static PreTokenizer,
    /// By step: its regex; `None` for a [`Step::Cut`].
    regexes: Vec<Option<Regex>>,
}

impl Splitter {
    pub(super) fn new(pre: &'static PreTokenizer) -> Result<Splitter, TokenizerError> {
        let compile = |step: &Step| match step {
            Match(regex) => Regex::new(regex).map(Some),
            Cut(_) => Ok(None),
        };
        Ok(Splitter { pre, regexes: pre.steps.iter().map(compile).collect::<Result<_, _>>()? })
    }

    /// The words of a text; none is empty.
    ///
    /// # Errors
    /// A regex exceeds its limit of backtracking.
    pub(super) fn split<'t>(&self, text: &'t str) -> Result<Vec<&'t str>, TokenizerError> {
        let mut words = vec![text];
        for (step, regex) in self.pre.steps.iter().zip(&self.regexes) {
            let mut shorter = Vec::with_capacity(words.len());
            for word in words {
                let mut end = 0;
                let mut push = |to: usize| {
                    if to > end {
                        shorter.push(&word[end..to]);
                        end = to;
                    }
                };
                if let Cut(positions) = step {
                    positions(word).into_iter().for_each(&mut push);
                }
                for found in regex.iter().flat_map(|regex| regex.find_iter(word)) {
                    let found = found?;
                    push(found.start());
                    push(found.end());
                }
                push(word.len());
            }
            words = shorter;
        }
        Ok(words)
    }
}

/// Where groups of three digits end, if each run of digits is cut from its right. The first group keeps the text before it.
fn ends_of_digit_groups(word: &str) -> Vec<usize> {
    let mut ends = Vec::new();
    // Digits of the current run that are to its right.
    let mut right = 0;
    for (at, c) in word.char_indices().rev() {
        right = if c.is_numeric() { right + 1 } else { 0 };
        if right % 3 == 1 {
            ends.push(at + c.len_utf8());
        }
    }
    ends.reverse();
    ends
}

/// Where groups of three digits start, if each run of ASCII digits is cut from its right: the matches of
/// `(?=(?:[0-9]{3})+(?![0-9]))`, a regex that reads the rest of the run at each digit.
fn starts_of_ascii_digit_groups(word: &str) -> Vec<usize> {
    let mut starts = Vec::new();
    // Digits of the current run that are at its right end, up to this one.
    let mut right = 0;
    for (at, byte) in word.bytes().enumerate().rev() {
        right = if byte.is_ascii_digit() { right + 1 } else { 0 };
        if right > 0 && right % 3 == 0 {
            starts.push(at);
        }
    }
    starts.reverse();
    starts
}

#[cfg(test)]
mod tests {
    use super::*;
    use fancy_regex::RegexBuilder;

    #[test]
    fn groups_of_ascii_digits_start_where_the_regex_matches() {
        let regex = Regex::new("(?=(?:[0-9]{3})+(?![0-9]))").unwrap();
        let mut random = fastrand::Rng::with_seed(3);
        for len in 0..2000 {
            let word: String =
                (0..len % 20).filter_map(|_| random.choice(['1', '2', '3', '4', '\u{664}', 'a'])).collect();
            let matches: Vec<_> = regex.find_iter(&word).map(|found| found.unwrap().start()).collect();
            assert_eq!(starts_of_ascii_digit_groups(&word), matches, "{word:?}");
        }
    }

    /// A regex's limit of backtracking holds for each match, so the limit times the number of words bounds the work for a text:
    /// either each word takes little, or there are few words.
    #[test]
    fn no_pre_tokenizer_takes_quadratic_work_for_a_run_of_one_character() {
        const LEN: usize = 3000;
        for pre in TABLE {
            let limited = |limit| {
                let compile = |step: &Step| match step {
                    Match(regex) => RegexBuilder::new(regex).backtrack_limit(limit).build().map(Some),
                    Cut(_) => Ok(None),
                };
                let regexes = pre.steps.iter().map(compile).collect::<Result<_, _>>().unwrap();
                (limit, Splitter { pre, regexes })
            };
            let splitters = [limited(32), limited(16 * LEN)];
            for c in ["1", "a", "A", "\u{e9}", "\u{4e2d}", "\u{664}", " ", "\n", "!", "'", "_"] {
                for end in ["", "a", "1", "\u{4e2d}", "\n"] {
                    let text = c.repeat(LEN) + end;
                    let is_linear = |(limit, splitter): &(usize, Splitter)| {
                        splitter.split(&text).is_ok_and(|words| words.len() * limit <= 128 * LEN)
                    };
                    assert!(splitters.iter().any(is_linear), "{:?}: {LEN} times {c:?}, then {end:?}", pre.names);
                }
            }
        }
    }
}
