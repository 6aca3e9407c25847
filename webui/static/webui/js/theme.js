/* Sets the chosen theme before the first paint; a classic script in <head>, so that nothing flashes. */
try {
  const theme = localStorage.getItem("orrery-theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch { /* storage is switched off: the system's theme holds */ }
