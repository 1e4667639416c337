//! The value of `--split`, and numbers of other options.

/// How a model is split over devices.
#[derive(Clone, Debug, PartialEq)]
pub enum Split {
    /// Whole layers: each device's share of them.
    Layers(Vec<f32>),
    /// Groups of devices that each have a part of every layer of the group. Empty: one group of all devices with equal shares.
    Tensor(Vec<GroupShares>),
}

/// The shares of a tensor group and of its devices.
#[derive(Clone, Debug, PartialEq)]
pub struct GroupShares {
    /// The group's share of the layers; `None` to place them by memory.
    pub layers: Option<f32>,
    /// By device: its share of each layer.
    pub devices: Vec<f32>,
}

/// Parses the value.
pub(super) fn split(text: &str) -> Result<Split, String> {
    let Some(rest) = text.strip_prefix("tensor") else {
        return text
            .split(',')
            .map(|text| number(text, "a share, 0 or more", |x| x >= 0.0))
            .collect::<Result<_, _>>()
            .map(Split::Layers);
    };
    let groups = match rest.strip_prefix('=') {
        None if rest.is_empty() => return Ok(Split::Tensor(Vec::new())),
        None => return Err("expected tensor, tensor=SHARES or shares".to_owned()),
        Some(groups) => groups.split('/'),
    };
    let share = |text: &str| number(text, "a share above 0", |x| x > 0.0);
    let shares = |group: &str| {
        let (layers, devices) = group.split_once(':').map_or((None, group), |(layers, rest)| (Some(layers), rest));
        let devices = devices.split(',').map(share).collect::<Result<_, _>>()?;
        Ok(GroupShares { layers: layers.map(share).transpose()?, devices })
    };
    let groups = groups.map(shares).collect::<Result<Vec<_>, String>>()?;
    if groups.iter().any(|group| group.layers.is_some() != groups[0].layers.is_some()) {
        return Err("expected LAYERS: for every group, or for none".to_owned());
    }
    Ok(Split::Tensor(groups))
}

/// Parses a finite number that satisfies `fits`. clap prints the error after the value and the option's name.
pub(super) fn number(text: &str, expected: &str, fits: impl Fn(f32) -> bool) -> Result<f32, String> {
    text.parse().ok().filter(|x: &f32| x.is_finite() && fits(*x)).ok_or_else(|| format!("expected {expected}"))
}
