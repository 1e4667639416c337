//! Tests of printf formatting; the expected texts are glibc's output.

use super::*;

/// The arguments of a printf call, packed as device code packs them: each aligned to its size.
#[derive(Default)]
struct PackedArguments(Vec<u8>);

impl PackedArguments {
    fn append(mut self, bytes: &[u8]) -> Self {
        self.0.resize(self.0.len().next_multiple_of(bytes.len()), 0);
        self.0.extend_from_slice(bytes);
        self
    }

    fn int(self, value: i32) -> Self {
        self.append(&value.to_le_bytes())
    }

    fn long(self, value: i64) -> Self {
        self.append(&value.to_le_bytes())
    }

    fn double(self, value: f64) -> Self {
        self.append(&value.to_le_bytes())
    }
}

#[track_caller]
fn check(format: &str, arguments: PackedArguments, expected: &str) {
    let parsed = Format::parse(format.as_bytes());
    assert_eq!(parsed.argument_bytes(), arguments.0.len(), "{format:?}: bytes of the arguments");
    let mut read = |address: u64| (address == 0x1000).then(|| b"text".to_vec());
    assert_eq!(parsed.render(&arguments.0, &mut read), expected, "{format:?}");
    // Missing arguments must not panic.
    for bytes in 0..arguments.0.len() {
        parsed.render(&arguments.0[..bytes], &mut read);
    }
}

#[test]
fn integers_are_formatted_like_glibc() {
    let one = |value| PackedArguments::default().int(value);
    for (format, value, expected) in [
        ("%d", -5, "-5"),
        ("%i", i32::MIN, "-2147483648"),
        ("%u", -1, "4294967295"),
        ("%x", 0xbeef, "beef"),
        ("%X", 0xbeef, "BEEF"),
        ("%#x", 0xbeef, "0xbeef"),
        ("%#X", 0xbeef, "0XBEEF"),
        ("%#x", 0, "0"),
        ("%o", 8, "10"),
        ("%#o", 8, "010"),
        ("%#o", 0, "0"),
        ("%5d|", 42, "   42|"),
        ("%-5d|", 42, "42   |"),
        ("%05d", 42, "00042"),
        ("%05d", -42, "-0042"),
        ("%-05d|", 42, "42   |"),
        ("%+d", 42, "+42"),
        ("% d", 42, " 42"),
        ("%+ d", 42, "+42"),
        ("%.3d", 7, "007"),
        ("%6.3d", -7, "  -007"),
        ("%06.3d", -7, "  -007"),
        ("%.0d|", 0, "|"),
        ("%.d|", 0, "|"),
        ("%#08x", 0xff, "0x0000ff"),
        ("%hd", 0x1_8000, "-32768"),
        ("%hu", 0x1_8000, "32768"),
        ("%hhd", 0x1ff, "-1"),
        ("%hhu", 0x1ff, "255"),
        ("%c", 65, "A"),
        ("%3c|", 65, "  A|"),
        ("%-3c|", 65, "A  |"),
    ] {
        check(format, one(value), expected);
    }
    for format in ["%ld", "%lld", "%zd", "%jd", "%td"] {
        check(format, PackedArguments::default().long(-1 << 40), "-1099511627776");
    }
    check("%llx", PackedArguments::default().long(-1), "ffffffffffffffff");
    check("%lu", PackedArguments::default().long(-1), "18446744073709551615");
}

#[test]
fn floats_are_formatted_like_glibc() {
    for (format, value, expected) in [
        ("%f", 1.5, "1.500000"),
        ("%F", -1.5, "-1.500000"),
        ("%lf", 1.5, "1.500000"),
        ("%.0f", 2.5, "2"),
        ("%.0f", 3.5, "4"),
        ("%#.0f", 3.5, "4."),
        ("%.2f", 0.005, "0.01"),
        ("%8.3f|", 2.71849, "   2.718|"),
        ("%08.3f|", -2.71849, "-002.718|"),
        ("%-8.3f|", 2.71849, "2.718   |"),
        ("%+.1f", 0.0, "+0.0"),
        ("%f", -0.0, "-0.000000"),
        ("%f", 1e22, "10000000000000000000000.000000"),
        ("%e", 0.0, "0.000000e+00"),
        ("%e", 12345.678, "1.234568e+04"),
        ("%.2E", 1e-100, "1.00E-100"),
        ("%.0e", 15.0, "2e+01"),
        ("%#.0e", 15.0, "2.e+01"),
        ("%g", 0.0, "0"),
        ("%g", 100000.0, "100000"),
        ("%g", 1000000.0, "1e+06"),
        ("%g", 0.0001, "0.0001"),
        ("%g", 0.00001, "1e-05"),
        ("%g", 999999.5, "1e+06"),
        ("%g", 0.1, "0.1"),
        ("%.3g", 1234.5, "1.23e+03"),
        ("%.0g", 1234.5, "1e+03"),
        ("%#g", 1.0, "1.00000"),
        ("%#.1g", 1.0, "1."),
        ("%G", 1e-10, "1E-10"),
        ("%.17g", 0.1, "0.10000000000000001"),
        ("%a", 1.0, "0x1p+0"),
        ("%a", 0.0, "0x0p+0"),
        ("%a", -0.1, "-0x1.999999999999ap-4"),
        ("%A", 255.5, "0X1.FFP+7"),
        ("%a", 5e-324, "0x0.0000000000001p-1022"),
        ("%.1a", 1.53125, "0x1.8p+0"),
        ("%.1a", 1.59375, "0x1.ap+0"),
        ("%.0a", 1.9, "0x2p+0"),
        ("%.15a", 1.0, "0x1.000000000000000p+0"),
        ("%f", f64::INFINITY, "inf"),
        ("%F", f64::NEG_INFINITY, "-INF"),
        ("%08f", f64::INFINITY, "     inf"),
        ("%e", f64::NAN, "nan"),
        ("%G", f64::NAN, "NAN"),
    ] {
        check(format, PackedArguments::default().double(value), expected);
    }
}

#[test]
fn strings_and_pointers_are_formatted_like_glibc() {
    for (format, value, expected) in [
        ("%s", 0x1000, "text"),
        ("%6s|", 0x1000, "  text|"),
        ("%-6s|", 0x1000, "text  |"),
        ("%.2s", 0x1000, "te"),
        ("%s", 0, "(null)"),
        ("%s", 0x2000, "(unreadable)"),
        ("%p", 0x7f00_1234, "0x7f001234"),
        ("%p", 0, "(nil)"),
        ("%14p", 0x7f00_1234, "    0x7f001234"),
    ] {
        check(format, PackedArguments::default().long(value), expected);
    }
}

#[test]
fn arguments_are_read_at_their_alignment() {
    check(
        "%d %f %d %d %s\n",
        PackedArguments::default().int(1).double(2.0).int(3).int(4).long(0x1000),
        "1 2.000000 3 4 text\n",
    );
    check("%*d|%-*d|", PackedArguments::default().int(4).int(1).int(3).int(2), "   1|2  |");
    check("%*d|", PackedArguments::default().int(-4).int(1), "1   |");
    check("%.*f", PackedArguments::default().int(2).double(1.0), "1.00");
    check("%.*f", PackedArguments::default().int(-2).double(1.0), "1.000000");
}

#[test]
fn malformed_formats_are_printed_unchanged() {
    for (format, expected) in [
        ("", ""),
        ("plain", "plain"),
        ("100%", "100%"),
        ("%%", "%"),
        ("%%d", "%d"),
        ("%k", "%k"),
        ("%5", "%5"),
        ("%-", "%-"),
        ("%ll", "%ll"),
        ("%.", "%."),
        ("%n", "%n"),
        ("%99999999999999999999d", "%99999999999999999999d"),
        ("%.99999999d", "%.99999999d"),
        ("%5%", "%5%"),
    ] {
        check(format, PackedArguments::default(), expected);
    }
}

#[test]
fn random_formats_and_arguments_never_panic() {
    let mut random = fastrand::Rng::with_seed(7);
    let letters = b"%%%%dsfgeaxlhc*.0123456789-+ #pz\xff";
    for _ in 0..20_000 {
        let format: Vec<u8> = (0..random.usize(..12)).map(|_| letters[random.usize(..letters.len())]).collect();
        let arguments: Vec<u8> = (0..random.usize(..40)).map(|_| random.u8(..)).collect();
        let format = Format::parse(&format);
        format.argument_bytes();
        format.render(&arguments, &mut |_| None);
    }
}

#[test]
fn an_assertion_has_the_text_of_cuda() {
    let text = assertion(b"i < n", b"a.cu", 7, b"void k(int)", [1, 2, 3], [4, 5, 6]);
    assert_eq!(text, "a.cu:7: void k(int): block: [1,2,3], thread: [4,5,6] Assertion `i < n` failed.");
}
