// Numbers, times and sizes as people read them.
export const number = (value) => {
  if (value === null || value === undefined || Number.isNaN(value)) return '-';
  if (Number.isInteger(value)) return value.toLocaleString('en');
  if (Math.abs(value) >= 1000) return Math.round(value).toLocaleString('en');
  return Math.abs(value) < 0.001 && value ? value.toExponential(2) : value.toPrecision(4).replace(/\.?0+$/, '');
};
export const bytes = (value) => {
  const units = ['B', 'kB', 'MB', 'GB', 'TB'];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) { value /= 1000; unit += 1; }
  return `${unit ? value.toFixed(1) : Math.round(value)} ${units[unit]}`;
};
export const seconds = (value) => (value < 1 ? `${Math.round(value * 1000)} ms` : value < 120 ? `${value.toFixed(1)} s`
  : value < 7200 ? `${Math.round(value / 60)} min` : value < 172800 ? `${(value / 3600).toFixed(1)} h` : `${(value / 86400).toFixed(1)} d`);
export const short = (peer) => (peer ? `${peer.slice(0, 4)}...${peer.slice(-6)}` : '-');
export const time = (value) => new Date(value).toLocaleTimeString('en-GB');
export const duration = (since) => (since ? seconds(Math.max(0, (Date.now() - Date.parse(since)) / 1000)) : '-');
