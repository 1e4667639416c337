//! Own templates with the text that jinja2 makes of them, hostile templates, and on request the templates of a folder beside
//! jinja2.

use super::*;
use jiff::civil::date;
use jiff::tz::TimeZone;
use std::ops::Range;
use std::process::Command;

struct Case {
    name: &'static str,
    template: &'static str,
    /// Which messages of [`talk`] the conversation has.
    messages: Range<usize>,
    /// What jinja2 3.1.6 renders in the environment of `tests/interop/test_chat_templates.py`.
    text: &'static str,
}

/// A template of the form that Qwen and many others have.
const CHATML: &str = "{%- for message in messages %}\n    \
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>\\n' -}}\n\
    {%- endfor %}\n{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\\n' }}\n\
    {%- endif %}\n";

/// A template of the form of Llama 2: the system prompt is a part of the first message.
const LLAMA_2: &str = "{% if messages[0].role == 'system' %}{% set start = 1 %}\
    {% set system = '<<SYS>>\\n' ~ messages[0].content ~ '\\n<</SYS>>\\n\\n' %}{% else %}\
    {% set start = 0 %}{% set system = '' %}{% endif %}{% for m in messages[start:] %}\
    {% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}\
    {% endif %}{% if m.role == 'user' %}\
    {{ bos_token + '[INST] ' + (system if loop.first else '') + m.content.strip() + ' [/INST]' }}\
    {% else %}{{ ' ' + m.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}";

const CASES: [Case; 14] = [
    Case {
        name: "chatml",
        template: CHATML,
        messages: 1..2,
        text: "<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n",
    },
    Case {
        name: "chatml",
        template: CHATML,
        messages: 0..4,
        text: "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello!<|im_end|>\n\
            <|im_start|>assistant\nHi.<|im_end|>\n<|im_start|>user\nWhy <&'\"> é 🦀?<|im_end|>\n<|im_start|>assistant\n",
    },
    Case { name: "llama 2", template: LLAMA_2, messages: 1..2, text: "<s>[INST] Hello! [/INST]" },
    Case {
        name: "llama 2",
        template: LLAMA_2,
        messages: 0..4,
        text: "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHello! [/INST] Hi. </s><s>[INST] Why <&'\"> é 🦀? [/INST]",
    },
    Case {
        name: "blocks",
        template: "  {% if true %}\n  x\n\t{# a comment #}\n  {%+ if true %}y{% endif %}\n{% endif %}\n\n",
        messages: 0..4,
        text: "  x\n  y",
    },
    Case {
        name: "lines",
        template: "{% for m in messages %}\n  {% if m.role == 'user' %}\n{{ loop.index }}/{{ loop.length }} \
            {{ m.content }}\n  {% else %}\n-\n  {% endif %}\n{% endfor %}\n",
        messages: 0..4,
        text: "-\n2/4 Hello!\n-\n4/4 Why <&'\"> é 🦀?\n",
    },
    Case {
        name: "generation",
        template: "{% for m in messages %}\n{% generation %}\n{{ m.content }}\n{%- endgeneration -%}\n  |\n{% endfor %}",
        messages: 0..4,
        text: "Be brief.|\nHello!|\n Hi.\n|\nWhy <&'\"> é 🦀?|\n",
    },
    Case {
        name: "json",
        template: "{{ messages[-1] | tojson }} {{ messages[:1] | tojson(indent=2) }} \
            {{ {'b': 1, 'a': [1.5, true, none, []], 'c': {}} | tojson(ensure_ascii=True) }} \
            {{ messages[-1].content | tojson(ensure_ascii=true) }} \
            {{ [1, {'a': 2}] | tojson(separators=(',', ':')) }}",
        messages: 0..4,
        text: r#"{"role": "user", "content": "Why <&'\"> é 🦀?"} [
  {
    "role": "system",
    "content": "Be brief."
  }
] {"b": 1, "a": [1.5, true, null, []], "c": {}} "Why <&'\"> \u00e9 \ud83e\udd80?" [1,{"a":2}]"#,
    },
    Case {
        name: "date",
        template: "{{ strftime_now('%d %b %Y, %A %H:%M:%S %-d') }}",
        messages: 0..4,
        text: "07 Mar 2026, Saturday 09:05:08 7",
    },
    Case {
        name: "values",
        template: "{{ true }} {{ none }} {{ [1, 'a', false, {'k': none}] }} {{ 7 // 2 }} {{ 1 / 2 }} \
            {{ 'a' ~ true ~ 1 }} {{ undefined_name }} {{ tools is none }} {{ tools is defined }} \
            {{ tools is iterable }} {{ [true, none] | join(',') }} {{ true | string }}",
        messages: 0..4,
        text: "True None [1, 'a', False, {'k': None}] 3 0.5 aTrue1  True True False True,None True",
    },
    Case {
        name: "namespace",
        template: "{% set ns = namespace(n=0, last=none) %}{% for m in messages %}{% if m.role == 'system' %}\
            {% continue %}{% endif %}{% set ns.n = ns.n + 1 %}{% set ns.last = m.role %}{% if ns.n == 2 %}\
            {% break %}{% endif %}{% endfor %}{{ ns.n }} {{ ns.last }}",
        messages: 0..4,
        text: "2 assistant",
    },
    Case {
        name: "macro",
        template: "{% macro say(who, text='-') %}{{ who|upper }}: {{ text.split('\\n')[0].replace('H', 'J') }};\
            {% endmacro %}{% for m in messages %}{{ say(m.role, text=m.content) }}{% endfor %}{{ say('x') }}",
        messages: 0..4,
        text: "SYSTEM: Be brief.;USER: Jello!;ASSISTANT:  Ji.;USER: Why <&'\"> é 🦀?;X: -;",
    },
    Case {
        name: "methods",
        template: "{% set t = '<think>a</think> b ' %}{{ t.split('</think>')[-1].lstrip() }}|\
            {{ t.rstrip().endswith('b') }}|{{ t.startswith('<t') }}|{{ 'aBc'.title() }}|{{ ' x'.strip(' ') }}|\
            {{ 'a,b'.split(',')|length }}|{{ messages[0].get('name', 'none') }}|\
            {% for k, v in messages[0].items() %}{{ k }}={{ v }},{% endfor %}|{{ messages[::-1][0].role }}|\
            {{ 'x'.join(['1', '2']) }}|{{ 'content' in messages[0] }}|{{ '%s-%d' | format('a', 3) }}|\
            {{ 'a{}b'.format(1) }}",
        messages: 0..4,
        text: "b |True|True|Abc|x|2|none|role=system,content=Be brief.,|user|1x2|True|a-3|a1b",
    },
    Case {
        name: "filters",
        template: "{{ messages | selectattr('role', 'equalto', 'user') | list | length }} \
            {{ messages | map(attribute='role') | join('+') }} {{ (messages | first).role }} \
            {{ '  a b ' | trim }} {{ missing | default('d') }} {{ 'ab' | replace('a', 'c') }} \
            {{ 'x\ny' | indent(2) }} {{ {'b': 2, 'a': 1} | dictsort }} {{ 3.0 | int }} {{ 'A' | lower }} \
            {{ [3, 1] | sort }} {{ 'a' is string }} {{ messages is iterable }} {{ messages[0] is mapping }} \
            {{ 1 is number }}",
        messages: 0..4,
        text: "2 system+user+assistant+user system a b d cb x\n  y [('a', 1), ('b', 2)] 3 a [1, 3] True True True True",
    },
];

fn template(source: &str) -> Result<ChatTemplate, TemplateError> {
    let now = date(2026, 3, 7).at(9, 5, 8, 0).to_zoned(TimeZone::UTC).unwrap();
    ChatTemplate::new(source, &SpecialTokens { bos: "<s>".to_owned(), eos: "</s>".to_owned() }, now)
}

fn talk() -> Vec<Message> {
    let message = |role, content: &str| Message { role, content: content.to_owned() };
    vec![
        message(Role::System, "Be brief."),
        message(Role::User, "Hello!"),
        message(Role::Assistant, " Hi.\n"),
        message(Role::User, "Why <&'\"> é 🦀?"),
    ]
}

#[test]
fn templates_render_as_jinja2_does() {
    let talk = talk();
    for Case { name, template: source, messages, text } in CASES {
        assert_eq!(template(source).unwrap().render(&talk[messages]).unwrap(), text, "{name}");
    }
}

/// The variables that llama.cpp adds to the variables of transformers.
#[test]
fn templates_get_dates_and_whether_to_think() {
    let source = "{{ date_string }}|{{ datetime }}|{{ strftime_now('%d %b %Y') }}|\
        {% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}";
    for (thinking, end) in [(true, ""), (false, "<think></think>")] {
        let text = template(source).unwrap().with_thinking(thinking).render(&talk()).unwrap();
        assert_eq!(text, format!("07 Mar 2026|Mar 07 2026|07 Mar 2026|{end}"));
    }
}

#[test]
fn templates_with_errors_are_refused_and_expensive_ones_end() {
    let long = "x".repeat(MAX_TEMPLATE_BYTES + 1);
    let nested = format!("{{{{ {}1{} }}}}", "[".repeat(100_000), "]".repeat(100_000));
    let cases = [
        (
            "{% if messages[0].role == 'system' %}{{ raise_exception('no system prompt here') }}{% endif %}",
            "the chat template refuses the conversation: no system prompt here",
        ),
        ("{{ raise_exception('') }}", "the chat template refuses the conversation: "),
        ("a\n{% if %}", "the chat template is invalid: syntax error: unexpected end of block (in template:2)"),
        ("{{ messages[0].role.nothing.at_all }}", "the chat template failed: "),
        ("{{ messages | no_such_filter }}", "no_such_filter"),
        ("{{ strftime_now('%&') }}", "the chat template failed: "),
        ("{% include 'other' %}", "the chat template"),
        (&long, "the chat template has 1048577 bytes, and may have 1048576"),
        (&nested, "the chat template is invalid: "),
        ("{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}", "too expensive"),
        (
            "{% set n = namespace(x='ab') %}{% for i in range(64) %}{% set n.x = n.x + n.x %}{% endfor %}",
            "too expensive",
        ),
        ("{{ 'a' * 1000000000000 }}", "too expensive"),
        ("{{ 'a'.replace('', 'b' * 100000).replace('', 'b' * 100000) }}", "too expensive"),
        ("{{ range(1000000000) | list }}", "the chat template"),
        ("{{ range(90000) | list | tojson(separators=['a' * 100000, ':']) }}", "the chat template failed: "),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "the chat template failed: "),
        (
            "{% set n = namespace(x=[]) %}{% for i in range(90000) %}{% set n.x = [n.x] %}{% endfor %}{{ n.x | tojson }}",
            "the chat template failed: ",
        ),
        (
            "{% set n = namespace(x=[]) %}{% for i in range(90000) %}{% for j in range(90000) %}{% set n.x = [n.x] %}\
            {% endfor %}{% endfor %}",
            "too expensive",
        ),
    ];
    for (source, expected) in cases {
        let error = template(source).and_then(|template| template.render(&talk())).map_err(|e| e.to_string());
        assert!(error.as_ref().is_err_and(|error| error.contains(expected)), "{:.200}: {error:.200?}", source);
    }
}

/// All templates of the folder `FANOUT_CHAT_TEMPLATES` beside jinja2 of the Python interpreter `FANOUT_PYTHON`, with the
/// conversations of `tests/interop/test_chat_templates.py`. `scripts/interop.sh chat-templates` runs this.
#[test]
#[ignore = "needs a folder of templates, and Python with jinja2"]
fn templates_of_a_folder_render_as_jinja2_does() {
    let variable = |name: &str| std::env::var(name).unwrap_or_else(|_| panic!("{name} is not set"));
    let folder = variable("FANOUT_CHAT_TEMPLATES");
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/interop/test_chat_templates.py");
    let output = Command::new(variable("FANOUT_PYTHON")).args([script, "--render", &folder]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let (mut same, mut refused, mut lenient, mut wrong) = (0, 0, 0, Vec::new());
    for line in output.stdout.split(|&byte| byte == b'\n').filter(|line| !line.is_empty()) {
        let row: Value = serde_json::from_slice(line).unwrap();
        let field = |name: &str| row.get_attr(name).unwrap();
        let source = std::fs::read_to_string(format!("{folder}/{}", field("template"))).unwrap();
        let rendered = template(&source).and_then(|template| template.render_variables(field("variables")));
        let wanted = field("text");
        match (wanted.as_str(), &rendered) {
            (Some(text), Ok(rendered)) if text == rendered => same += 1,
            (None, Err(_)) => refused += 1,
            (None, Ok(_)) if field("error").to_string().starts_with("TypeError") => lenient += 1,
            _ => wrong.push(format!(
                "{}, {}:\n  jinja2 {wanted:?} {}\n  here   {rendered:?}",
                field("template"),
                field("case"),
                field("error")
            )),
        }
    }
    println!("{same} texts are the same; {refused} are refused by both, {lenient} by Python's types alone");
    assert!(wrong.is_empty() && same > 0, "{} differ:\n{}", wrong.len(), wrong.join("\n"));
}
