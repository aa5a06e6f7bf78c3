//! Prints docs/reference/algorithms.md.

#![expect(clippy::print_stdout, reason = "that is what it is for")]

fn main() {
    print!("{}", kvist_schedule::catalogue::reference_page());
}
