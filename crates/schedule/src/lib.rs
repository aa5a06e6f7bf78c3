//! Filter, score, pick; reservations.
