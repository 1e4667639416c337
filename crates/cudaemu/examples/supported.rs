//! Prints the instructions that the emulator supports, as Markdown.

fn main() {
    print!("{}", cudaemu::isa::table().markdown());
}
