// uPlot over columns: one plot an element, made once and fed afterwards.
import { bytes, number } from './words.js';

const plots = new Map();
const LABELS = { reward: 'reward', eval_reward: 'held-out', version: 'step', tokens_per_s: 'tokens/s',
  staleness_p50: 'median', staleness_p95: '95 %', loss: 'loss', ess_ratio: 'of raw ratios', ess_ratio_weights: 'of weights used',
  lr_multiplier: 'multiplier', grad_norm: 'norm', kl: 'KL', clip_fraction: 'of all', clip_fraction_fresh: 'of fresh',
  up_bytes_per_s: 'up', down_bytes_per_s: 'down' };
const UNITS = { up_bytes_per_s: bytes, down_bytes_per_s: bytes };  // others are plain numbers
const HEIGHT = 190;

export function draw(element, title, names, series) {
  if (!element || !window.uPlot || !series.t || names.some((name) => !series[name])) return;
  const data = [series.t, ...names.map((name) => series[name])];
  const known = plots.get(element);
  if (known) {
    if (known.shown === series) return;
    known.shown = series;
    known.plot.setData(data);
    return;
  }
  const plot = new window.uPlot(options(element, names), data, element);
  const observer = new ResizeObserver(() => plot.setSize({ width: element.clientWidth, height: HEIGHT }));
  observer.observe(element);
  plots.set(element, { plot, observer, shown: series });
}

export function forget() {
  for (const { plot, observer } of plots.values()) {
    observer.disconnect();
    plot.destroy();
  }
  plots.clear();
}

/** 24 hours, with seconds where less than ten minutes are shown, with the day where more than one is. */
function clock(seconds, plot) {
  const shown = plot.scales.x.max - plot.scales.x.min;
  const text = new Date(seconds * 1000).toLocaleTimeString([], { hour12: false, timeStyle: shown < 600 ? 'medium' : 'short' });
  return shown < 86400 ? text : `${new Date(seconds * 1000).toLocaleDateString([], { month: 'short', day: 'numeric' })} ${text}`;
}

function options(element, names) {
  const css = getComputedStyle(document.documentElement);
  const ink = css.getPropertyValue('--dim').trim();
  const grid = { stroke: css.getPropertyValue('--grid').trim(), width: 1 };
  const unit = UNITS[names[0]] ?? number;
  const axis = { stroke: ink, grid, ticks: grid };
  return {
    width: element.clientWidth, height: HEIGHT, cursor: { drag: { x: true, y: false } },
    axes: [{ ...axis, space: 80, values: (plot, ticks) => ticks.map((tick) => clock(tick, plot)) }, { ...axis, size: 70, values: (plot, ticks) => ticks.map(unit) }],
    series: [{}, ...names.map((name, index) => ({
      label: LABELS[name] ?? name, stroke: css.getPropertyValue(`--plot${index + 1}`).trim(), width: 1.5, spanGaps: true,
      points: { show: false, fill: css.getPropertyValue('--card').trim() },
      value: (plot, value) => (value === null ? '-' : unit(value)),
    }))],
  };
}

matchMedia('(prefers-color-scheme: dark)').addEventListener('change', forget);
