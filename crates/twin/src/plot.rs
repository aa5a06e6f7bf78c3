//! A study as a picture: what each policy finds, what that costs in waiting, and when.

use std::fmt::Write as _;

use crate::{MeshReport, Study};

/// Colors that people tell apart whatever their eyes (Okabe and Ito, "Color Universal Design", 2008), yellow left out.
const COLORS: [&str; 7] = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000"];

const WIDTH: f64 = 960.0;
const LEGEND_ROW: f64 = 20.0;
const GRAY: &str = "#666";

/// A rectangle of the picture with its axes.
struct Panel {
    left: f64,
    top: f64,
    width: f64,
    height: f64,
    across: Axis,
    up: Axis,
}

/// Where a value lies on a side of a panel, from 0 to 1.
struct Axis {
    title: &'static str,
    least: f64,
    most: f64,
    is_logarithmic: bool,
}

impl Axis {
    /// From 0 to the most that is shown.
    fn linear(title: &'static str, most: f64) -> Self {
        Self { title, least: 0.0, most: if most > 0.0 { most } else { 1.0 }, is_logarithmic: false }
    }

    /// In seconds, over whole powers of ten; what is less than the first of them is drawn there.
    fn seconds(title: &'static str, values: impl Iterator<Item = f64> + Clone) -> Self {
        let most = values.clone().fold(0.1, f64::max);
        let least = values.filter(|value| *value > 0.0).fold(most, f64::min).max(1e-3);
        let (low, high) = (least.log10().floor(), most.log10().ceil());
        Self { title, least: low, most: if high > low { high } else { low + 1.0 }, is_logarithmic: true }
    }

    fn share(&self, value: f64) -> f64 {
        let value = if self.is_logarithmic { value.max(f64::MIN_POSITIVE).log10() } else { value };
        ((value - self.least) / (self.most - self.least)).clamp(0.0, 1.0)
    }

    /// Places and their labels.
    fn ticks(&self) -> Vec<(f64, String)> {
        if self.is_logarithmic {
            let powers = self.least as i32..=self.most as i32;
            return powers.map(|power| 10f64.powi(power)).map(|value| (value, format!("{value}"))).collect();
        }
        // A quarter of the range at most, and one, two or five of a power of ten.
        let rough = self.most / 4.0;
        let power = 10f64.powf(rough.log10().floor());
        let step = [5.0, 2.0, 1.0].map(|times| times * power).into_iter().find(|step| *step <= rough).unwrap_or(power);
        let count = (self.most / step + 1e-9) as i32;
        let digits = usize::try_from(-(step.log10().floor() as i32)).unwrap_or(0);
        (0..=count).map(|tick| f64::from(tick) * step).map(|value| (value, format!("{value:.digits$}"))).collect()
    }
}

impl Panel {
    fn at(&self, across: f64, up: f64) -> (f64, f64) {
        let height = self.height * (1.0 - self.up.share(up));
        (self.left + self.width * self.across.share(across), self.top + height)
    }

    /// Frame, grid, labels, titles.
    fn draw(&self, svg: &mut String) {
        let Self { left, top, width, height, .. } = self;
        let (bottom, right) = (top + height, left + width);
        for (value, label) in self.across.ticks() {
            let x = left + width * self.across.share(value);
            line(svg, (x, *top), (x, bottom), "#ddd");
            text(svg, (x, bottom + 16.0), "middle", GRAY, &label);
        }
        for (value, label) in self.up.ticks() {
            let y = top + height * (1.0 - self.up.share(value));
            line(svg, (*left, y), (right, y), "#ddd");
            text(svg, (left - 6.0, y + 4.0), "end", GRAY, &label);
        }
        text(svg, (left + width / 2.0, bottom + 34.0), "middle", "#000", self.across.title);
        text(svg, (*left, top - 8.0), "start", "#000", self.up.title);
    }
}

fn line(svg: &mut String, from: (f64, f64), to: (f64, f64), color: &str) {
    let ((x1, y1), (x2, y2)) = (from, to);
    let _ = writeln!(svg, r#"<line x1="{x1:.1}" y1="{y1:.1}" x2="{x2:.1}" y2="{y2:.1}" stroke="{color}"/>"#);
}

fn text(svg: &mut String, (x, y): (f64, f64), anchor: &str, color: &str, words: &str) {
    let words = escaped(words);
    let _ = writeln!(svg, r#"<text x="{x:.1}" y="{y:.1}" text-anchor="{anchor}" fill="{color}">{words}</text>"#);
}

fn escaped(words: &str) -> String {
    words.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// The study as an SVG: hit rate against worst backlog, hit rate against the time to the first token, and the backlog
/// over time. Each policy is one group of class `series`.
#[must_use]
pub fn plot(study: &Study) -> String {
    let reports = &study.policies;
    let top = 60.0 + LEGEND_ROW * reports.len().div_ceil(3) as f64;
    let most_hits = reports.iter().map(|report| report.hit_rate.max(report.ideal_hit_rate)).fold(0.0, f64::max);
    let hits = || Axis::linear("hit rate; dashed: one cache without bounds", 1.05 * most_hits);
    let first_tokens = reports.iter().flat_map(|report| {
        let first = report.time_to_first_token_seconds;
        [first.p50, first.p95, first.p99]
    });
    let backlogs = reports.iter().flat_map(|report| report.backlog_seconds_over_time.iter().copied());
    let span = reports.iter().map(over_time).fold(0.0, f64::max);
    let panels = [
        Panel {
            left: 60.0,
            top,
            width: 390.0,
            height: 240.0,
            across: Axis::seconds("worst backlog, s", reports.iter().map(|report| report.worst_backlog_seconds)),
            up: hits(),
        },
        Panel {
            left: 530.0,
            top,
            width: 390.0,
            height: 240.0,
            across: Axis::seconds("time to first token, s: p50 (dot), p95, p99 (ends of the line)", first_tokens),
            up: hits(),
        },
        Panel {
            left: 60.0,
            top: top + 330.0,
            width: 860.0,
            height: 200.0,
            across: Axis::linear("time, s", span),
            up: Axis::seconds("worst backlog of any worker, s", backlogs),
        },
    ];
    let height = top + 590.0;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" font-family=\"sans-serif\" \
         font-size=\"12\">\n<rect width=\"{WIDTH}\" height=\"{height}\" fill=\"#fff\"/>\n"
    );
    let settings = &study.settings;
    let title = format!(
        "{} workers of {} blocks, {} routers, seed {}",
        settings.workers, settings.engine.blocks, settings.routers, settings.seed
    );
    text(&mut svg, (60.0, 28.0), "start", "#000", &title);
    panels.iter().for_each(|panel| panel.draw(&mut svg));
    let ideal = reports.first().map_or(0.0, |report| report.ideal_hit_rate);
    for panel in panels.iter().take(2) {
        let (_, y) = panel.at(0.0, ideal);
        let (left, right) = (panel.left, panel.left + panel.width);
        let _ = writeln!(
            svg,
            r#"<line x1="{left}" y1="{y:.1}" x2="{right}" y2="{y:.1}" stroke="{GRAY}" stroke-dasharray="4"/>"#
        );
    }
    for (number, (report, color)) in reports.iter().zip(COLORS.iter().cycle()).enumerate() {
        series(&mut svg, &panels, report, number, color);
    }
    svg.push_str("</svg>\n");
    svg
}

/// Seconds that a report's backlog is known for.
fn over_time(report: &MeshReport) -> f64 {
    report.backlog_interval_seconds * report.backlog_seconds_over_time.len() as f64
}

fn series(
    svg: &mut String,
    [backlog, first_token, over_time]: &[Panel; 3],
    report: &MeshReport,
    number: usize,
    color: &str,
) {
    let name = escaped(&report.policy);
    let _ = writeln!(svg, r#"<g class="series" data-policy="{name}" fill="{color}" stroke="{color}">"#);
    let (x, y) = (60.0 + 300.0 * (number % 3) as f64, 50.0 + LEGEND_ROW * (number / 3) as f64);
    let _ = writeln!(svg, r#"<rect x="{x}" y="{}" width="12" height="12"/>"#, y - 10.0);
    let _ = writeln!(svg, r##"<text x="{}" y="{y}" stroke="none" fill="#000">{name}</text>"##, x + 18.0);
    dot(svg, backlog.at(report.worst_backlog_seconds, report.hit_rate));
    let first = report.time_to_first_token_seconds;
    let [p50, p95, p99] = [first.p50, first.p95, first.p99].map(|seconds| first_token.at(seconds, report.hit_rate));
    line(svg, p50, p99, color);
    for (x, y) in [p95, p99] {
        line(svg, (x, y - 5.0), (x, y + 5.0), color);
    }
    dot(svg, p50);
    let mut points = String::new();
    for (interval, seconds) in report.backlog_seconds_over_time.iter().enumerate() {
        let (x, y) = over_time.at((interval as f64 + 0.5) * report.backlog_interval_seconds, *seconds);
        let _ = write!(points, "{x:.1},{y:.1} ");
    }
    let _ = writeln!(svg, r#"<polyline points="{}" fill="none"/>"#, points.trim_end());
    svg.push_str("</g>\n");
}

fn dot(svg: &mut String, (x, y): (f64, f64)) {
    let _ = writeln!(svg, r#"<circle cx="{x:.1}" cy="{y:.1}" r="5"/>"#);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_within_the_axis() {
        let labels = |axis: &Axis| axis.ticks().into_iter().map(|(_, label)| label).collect::<Vec<_>>();
        assert_eq!(
            ["0.00", "0.05", "0.10", "0.15", "0.20", "0.25", "0.30", "0.35"],
            labels(&Axis::linear("", 0.384))[..]
        );
        assert_eq!(["0", "500", "1000", "1500", "2000", "2500", "3000", "3500"], labels(&Axis::linear("", 3537.0))[..]);
        let seconds = Axis::seconds("", [0.3, 0.0, 5251.0].into_iter());
        assert_eq!(["0.1", "1", "10", "100", "1000", "10000"], labels(&seconds)[..]);
        assert_eq!([0.0, 0.2, 1.0], [0.0, 1.0, 1e9].map(|value| seconds.share(value)));
        // Nothing to show is no reason for numbers that are none.
        assert_eq!(["0.1", "1"], labels(&Axis::seconds("", std::iter::empty()))[..]);
        assert_eq!(0.5, Axis::linear("", 0.0).share(0.5));
    }

    #[test]
    fn each_policy_is_one_series_and_every_number_is_one() {
        let text = r#"{"policies": ["cost", "most_overlap"], "made": "shared_prefix", "until_seconds": 3}"#;
        let request: crate::StudyRequest = serde_json::from_str(text).unwrap();
        let svg = plot(&request.run("").unwrap());
        assert_eq!(2, svg.matches("<g class=\"series\"").count());
        assert_eq!(2, svg.matches("<polyline").count());
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
        assert_eq!(svg.matches("<g").count(), svg.matches("</g>").count());
    }

    #[test]
    fn names_cannot_leave_their_places() {
        assert_eq!("&lt;a b=&quot;c&quot;&gt; &amp;amp;", escaped("<a b=\"c\"> &amp;"));
    }
}
