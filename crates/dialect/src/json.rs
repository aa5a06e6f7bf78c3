//! JSON written straight into bytes.

use std::fmt::Write as _;

use bytes::{BufMut as _, BytesMut};

pub(crate) fn write_list<T>(out: &mut BytesMut, items: &[T], mut write: impl FnMut(&mut BytesMut, &T)) {
    for (position, item) in items.iter().enumerate() {
        if position > 0 {
            out.put_u8(b',');
        }
        write(out, item);
    }
}

pub(crate) fn write_number(out: &mut BytesMut, number: u32) {
    if let Ok(digit @ 0..=9) = u8::try_from(number) {
        out.put_u8(b'0' + digit);
    } else {
        write_display(out, format_args!("{number}"));
    }
}

pub(crate) fn write_display(out: &mut BytesMut, text: std::fmt::Arguments<'_>) {
    // A buffer grows as needed: writing into it cannot fail.
    let written = out.write_fmt(text);
    debug_assert!(written.is_ok());
}

/// A JSON string: runs of plain bytes are copied at once.
pub(crate) fn write_string(out: &mut BytesMut, text: &str) {
    const HEX: &[u8; 16] = b"0123456789abcdef";
    out.reserve(text.len() + 2);
    out.put_u8(b'"');
    let bytes = text.as_bytes();
    let mut start = 0;
    for (position, byte) in bytes.iter().enumerate() {
        if *byte >= 0x20 && *byte != b'"' && *byte != b'\\' {
            continue;
        }
        out.put_slice(&bytes[start..position]);
        start = position + 1;
        match byte {
            b'"' => out.put_slice(b"\\\""),
            b'\\' => out.put_slice(b"\\\\"),
            b'\n' => out.put_slice(b"\\n"),
            b'\r' => out.put_slice(b"\\r"),
            b'\t' => out.put_slice(b"\\t"),
            other => {
                out.put_slice(b"\\u00");
                out.put_slice(&[HEX[usize::from(other >> 4)], HEX[usize::from(other & 15)]]);
            }
        }
    }
    out.put_slice(&bytes[start..]);
    out.put_u8(b'"');
}
