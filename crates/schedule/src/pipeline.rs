//! Candidates, filters, scorers, picker.

use std::cmp::Ordering;

use crate::{
    Candidate, ConfigError, CostParameters, CostTerms, Draws, PipelineConfig, Request, Round, Score,
    catalogue::Stage,
    config::{EPSILON_MOST_SECONDS, EPSILON_SECONDS, EPSILON_SHARE},
    scorers::{Memory, Scorer},
};

#[derive(Clone, Copy, Debug, PartialEq)]
enum Filter {
    AllowAll,
    Saturation { threshold: f64 },
    Breaker,
    Capability,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Picker {
    Max { epsilon: f64, share: f64, most: f64 },
    GambleSampling,
    PowerOfTwoChoices,
    Softmax { temperature: f64 },
}

/// What became of a decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// A target was chosen.
    Selected,
    /// No target takes requests, or none can serve this one.
    NoMatchingTarget,
    /// A prefill target was found, and no decode target that goes with it.
    NoMatchingDecode,
    /// All that could serve are saturated: the request may wait.
    Saturated,
}

impl Outcome {
    /// The outcome as a metric's label.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Selected => "selected",
            Self::NoMatchingTarget => "no_matching_target",
            Self::NoMatchingDecode => "no_matching_decode",
            Self::Saturated => "saturated",
        }
    }
}

/// What a decision says of one candidate.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Verdict {
    /// Why it was left out.
    pub filtered: Option<&'static str>,
    /// How good it is; none when it was left out.
    pub score: Option<Score>,
    /// The parts of its cost; none when it was left out, or when `cost` is not the scorer.
    pub terms: Option<CostTerms>,
}

/// What was considered, and what was chosen.
#[derive(Clone, Debug, PartialEq)]
pub struct Decision {
    /// In the order of the candidates.
    pub verdicts: Vec<Verdict>,
    /// Position of the chosen one.
    pub chosen: Option<usize>,
    /// What became of it.
    pub outcome: Outcome,
    /// Candidates that were left after the filters.
    pub selectable: usize,
}

/// A pipeline that is ready to decide.
#[derive(Clone, Debug)]
pub struct Pipeline {
    config: PipelineConfig,
    summary: String,
    filters: Vec<Filter>,
    scorers: Vec<(Scorer, f64)>,
    picker: Picker,
}

impl Pipeline {
    /// A pipeline as configured.
    ///
    /// # Errors
    /// A name or a parameter is unknown or out of range, or the parts do not go together. The message lists what is valid.
    pub fn new(config: PipelineConfig) -> Result<Self, ConfigError> {
        if config.scorers.is_empty() {
            return Err(ConfigError::new("the pipeline has no scorer").at("scorers"));
        }
        let mut filters = Vec::new();
        for (position, step) in config.filters.iter().enumerate() {
            let (algorithm, values) =
                step.resolve(Stage::Filter).map_err(|error| error.at(&format!("filters[{position}]")))?;
            filters.push(match (algorithm.name, values.as_slice()) {
                ("allow_all", _) => Filter::AllowAll,
                ("saturation", &[threshold]) => Filter::Saturation { threshold },
                ("breaker", _) => Filter::Breaker,
                ("capability", _) => Filter::Capability,
                _ => return Err(ConfigError::new(format!("filter {} is not made", algorithm.name))),
            });
        }
        let mut scorers = Vec::new();
        let mut algorithms = Vec::new();
        for (position, step) in config.scorers.iter().enumerate() {
            let place = format!("scorers[{position}]");
            let (algorithm, values) = step.resolve(Stage::Scorer).map_err(|error| error.at(&place))?;
            if config.scorers.iter().filter(|other| other.algorithm == step.algorithm).count() > 1 {
                let error = ConfigError::new(format!("scorer {} is named twice", algorithm.name));
                return Err(error.at("algorithm").at(&place));
            }
            if !(step.weight.is_finite() && step.weight > 0.0) {
                let error = ConfigError::new(format!("scorer {}: weight must be above 0", algorithm.name));
                return Err(error.at("weight").at(&place));
            }
            let scorer = Scorer::new(algorithm.name, &values)
                .ok_or_else(|| ConfigError::new(format!("scorer {} is not made", algorithm.name)))?;
            scorers.push((scorer, step.weight));
            algorithms.push(algorithm);
        }
        let (algorithm, values) = config.picker.resolve(Stage::Picker).map_err(|error| error.at("picker"))?;
        let picker = match (algorithm.name, values.as_slice()) {
            ("max", &[epsilon, share, most]) => Picker::Max { epsilon, share, most },
            ("gamble_sampling", _) => Picker::GambleSampling,
            ("power_of_two_choices", _) => Picker::PowerOfTwoChoices,
            ("softmax", &[temperature]) => Picker::Softmax { temperature },
            _ => return Err(ConfigError::new(format!("picker {} is not made", algorithm.name))),
        };
        PipelineConfig::check_composition(&algorithms, algorithm)?;
        let summary = config.summary();
        Ok(Self { config, summary, filters, scorers, picker })
    }

    /// Kvist's own pipeline with its defaults.
    #[must_use]
    pub fn standard() -> Self {
        let config = PipelineConfig::default();
        let summary = config.summary();
        Self {
            config,
            summary,
            filters: vec![Filter::Capability, Filter::Breaker],
            scorers: vec![(Scorer::Cost(CostParameters::default()), 1.0)],
            picker: Picker::Max { epsilon: EPSILON_SECONDS, share: EPSILON_SHARE, most: EPSILON_MOST_SECONDS },
        }
    }

    /// What it was made of.
    #[must_use]
    pub fn config(&self) -> &PipelineConfig {
        &self.config
    }

    /// Saturation above which its filters leave a target out; none without the filter `saturation`.
    #[must_use]
    pub fn saturation_threshold(&self) -> Option<f64> {
        let thresholds = self.filters.iter().filter_map(|filter| match filter {
            Filter::Saturation { threshold } => Some(*threshold),
            _ => None,
        });
        thresholds.min_by(f64::total_cmp)
    }

    /// In few words; see [`PipelineConfig::summary`].
    #[must_use]
    pub fn summary(&self) -> &str {
        &self.summary
    }

    /// Chooses a target. The memory is only read; [`Pipeline::picked`] writes it once the choice stands.
    #[must_use]
    pub fn decide(&self, request: &Request, candidates: &[Candidate], memory: &Memory, draws: &mut Draws) -> Decision {
        let mut verdicts = vec![Verdict::default(); candidates.len()];
        for (verdict, candidate) in verdicts.iter_mut().zip(candidates) {
            verdict.filtered = candidate.unavailable;
        }
        let could_serve = verdicts.iter().any(|verdict| verdict.filtered.is_none());
        let mut is_saturated = false;
        for filter in &self.filters {
            is_saturated |= filter.apply(candidates, &mut verdicts);
        }
        let left: Vec<usize> =
            (0..candidates.len()).filter(|position| verdicts[*position].filtered.is_none()).collect();
        if left.is_empty() {
            let outcome = if could_serve && is_saturated { Outcome::Saturated } else { Outcome::NoMatchingTarget };
            return Decision { verdicts, chosen: None, outcome, selectable: 0 };
        }
        let considered: Vec<&Candidate> = left.iter().map(|position| &candidates[*position]).collect();
        let (scores, terms) = self.score(request, &considered, memory);
        for (place, position) in left.iter().enumerate() {
            verdicts[*position].score = scores.get(place).copied();
            verdicts[*position].terms = terms.get(place).copied();
        }
        let chosen = self.picker.pick(&scores, draws).and_then(|place| left.get(place).copied());
        let outcome = if chosen.is_some() { Outcome::Selected } else { Outcome::NoMatchingTarget };
        Decision { verdicts, chosen, outcome, selectable: left.len() }
    }

    /// Notes that a decision was carried out.
    pub fn picked(&self, request: &Request, candidates: &[Candidate], decision: &Decision, memory: &mut Memory) {
        let Some(chosen) = decision.chosen.and_then(|chosen| candidates.get(chosen)) else { return };
        if request.round == Round::Encoder {
            return;
        }
        let considered = candidates.iter().zip(&decision.verdicts).filter(|(_, verdict)| verdict.filtered.is_none());
        let was_cold = considered.map(|(candidate, _)| candidate.matched_tokens()).all(|matched| matched == 0);
        for (scorer, _) in &self.scorers {
            scorer.picked(request, was_cold, &chosen.target, memory);
        }
    }

    fn score(&self, request: &Request, candidates: &[&Candidate], memory: &Memory) -> (Vec<Score>, Vec<CostTerms>) {
        if let [(scorer, _)] = self.scorers.as_slice() {
            let scored = scorer.score(request, candidates, memory);
            return (scored.scores, scored.terms);
        }
        let total_weight: f64 = self.scorers.iter().map(|(_, weight)| weight).sum();
        let mut sums = vec![0.0; candidates.len()];
        for (scorer, weight) in &self.scorers {
            let scored = scorer.score(request, candidates, memory);
            for (sum, score) in sums.iter_mut().zip(&scored.scores) {
                *sum += weight / total_weight * score.preference;
            }
        }
        (sums.into_iter().map(Score::of).collect(), Vec::new())
    }
}

impl Filter {
    /// Marks what must not serve; says whether that was for saturation.
    fn apply(self, candidates: &[Candidate], verdicts: &mut [Verdict]) -> bool {
        let mut is_saturated = false;
        let mut mark = |reason: &'static str, is_out: &dyn Fn(&Candidate) -> bool| {
            for (verdict, candidate) in verdicts.iter_mut().zip(candidates) {
                if verdict.filtered.is_none() && is_out(candidate) {
                    verdict.filtered = Some(reason);
                    is_saturated |= reason == "saturated";
                }
            }
        };
        match self {
            Self::AllowAll => {}
            Self::Saturation { threshold } => mark("saturated", &|one| one.saturation().is_above(threshold)),
            Self::Breaker => {
                let has_whole = candidates
                    .iter()
                    .any(|one| one.unavailable.is_none() && one.unsuitable.is_none() && !one.is_broken);
                if has_whole {
                    mark("breaker_open", &|one| one.is_broken);
                }
            }
            Self::Capability => {
                for (verdict, candidate) in verdicts.iter_mut().zip(candidates) {
                    verdict.filtered = verdict.filtered.or(candidate.unsuitable);
                }
            }
        }
        is_saturated
    }
}

impl Picker {
    fn pick(self, scores: &[Score], draws: &mut Draws) -> Option<usize> {
        let best = scores.iter().max_by(|left, right| left.compare(right))?;
        match self {
            Self::Max { epsilon, share, most } => {
                let epsilon = epsilon.max((share * best.preference.abs()).min(most));
                let near: Vec<usize> =
                    (0..scores.len()).filter(|position| scores[*position].is_within(epsilon, best)).collect();
                near.get(draws.below(near.len())).copied()
            }
            Self::GambleSampling => {
                let mut order: Vec<usize> = (0..scores.len()).collect();
                order.sort_by(|left, right| scores[*right].compare(&scores[*left]));
                let mut weights = vec![0.0; scores.len()];
                let mut weight = 0.0;
                for (place, position) in order.iter().enumerate() {
                    let is_tied = place > 0 && scores[order[place - 1]].compare(&scores[*position]) == Ordering::Equal;
                    if !is_tied {
                        weight = (scores.len() - place) as f64;
                    }
                    weights[*position] = weight;
                }
                draws.weighted(&weights)
            }
            Self::PowerOfTwoChoices => {
                let first = draws.below(scores.len());
                if scores.len() == 1 {
                    return Some(first);
                }
                let other = draws.below(scores.len() - 1);
                let second = if other >= first { other + 1 } else { other };
                Some(match scores[first].compare(&scores[second]) {
                    Ordering::Greater => first,
                    Ordering::Less => second,
                    Ordering::Equal => [first, second][draws.below(2)],
                })
            }
            Self::Softmax { temperature } => {
                // Relative to the best, so that no power overflows.
                let weight = |score: &Score| ((score.preference - best.preference) / temperature).exp();
                draws.weighted(&scores.iter().map(weight).collect::<Vec<f64>>())
            }
        }
    }
}
